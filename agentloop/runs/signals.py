"""Ctrl-C and SIGTERM: once, finish the iteration, commit, checkpoint; twice, end at once."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from agentloop.runs.watchdog import watched

_SHOW_CURSOR = b"\x1b[?25h\n"
_WORKING = "stopping after this iteration or update; again to stop at once (--resume continues either way)"
_IDLE = "stopped: no iteration was under way (--resume continues; a warm-up begins anew)"


@dataclass
class StopRequest:
    """Asked for by a signal; looked at between iterations."""

    signal_number: int | None = None
    has_work: bool = False
    """Whether something is under way that should be finished; if not, the first signal ends the run."""

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells expect: 130 for Ctrl-C, 143 for SIGTERM; 0 if nobody asked."""
        return 128 + self.signal_number if self.signal_number is not None else 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within, a signal is kept until somebody looks at it."""
        self.has_work = True
        try:
            yield
        finally:
            self.has_work = False


@contextmanager
def graceful_stop(show: Callable[[str], None], *, working: str = _WORKING, idle: str = _IDLE) -> Iterator[StopRequest]:
    """Within, the first signal asks and the second ends the process as a crash would: --resume mends both.

    The second does so some seconds later even where this process can't act on it.

    Outside of `StopRequest.working` there is nothing to finish: the first signal raises SystemExit. `working` and
    `idle` are shown at the first signal, there and here.
    """
    request = StopRequest()
    words: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def receive(number: int, frame: FrameType | None) -> None:
        if request.requested:
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)  # a live display had hidden it
            os._exit(128 + number)
        request.signal_number = number
        if request.has_work:
            words.put(working)
        else:
            words.put(idle)
            raise SystemExit(128 + number)

    # Not shown by `receive` itself: it may have interrupted the very print that `show` would do.
    teller = threading.Thread(target=_show_all, args=(words, show), name="signals", daemon=True)
    teller.start()
    previous = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with watched():
            yield request
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
        words.put(None)
        teller.join()


def _show_all(words: queue.SimpleQueue[str | None], show: Callable[[str], None]) -> None:
    while (text := words.get()) is not None:
        show(text)
