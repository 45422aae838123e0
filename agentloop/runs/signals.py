"""Handles Ctrl-C and SIGTERM. After the first signal a run finishes its iteration and saves; a second one ends it at
once."""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from agentloop.errors import RunStop, UserCodeFailed, UserError, raise_run_stop

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_RESUME = "--resume, in Python resume=True, continues"
_WORKING = f"stopping after this iteration or update; again to stop at once ({_RESUME} either way)"
_IDLE = f"stopped: no iteration was under way ({_RESUME}; a warm-up begins again)"


@dataclass
class StopRequest:
    """Remembers whether a signal has asked to stop. The run looks at it between iterations."""

    signal_number: int | None = None
    has_work: bool = False
    """Whether an iteration or update is under way, to be finished first; if not, the first signal ends the run."""

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells expect: 130 for Ctrl-C, 143 for SIGTERM; 0 without a signal."""
        return 128 + self.signal_number if self.signal_number is not None else 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within the block, a signal only sets the request."""
        self.has_work = True
        try:
            yield
        finally:
            self.has_work = False


@contextmanager
def graceful_stop(show: Callable[[str], None], *, working: str = _WORKING, idle: str = _IDLE) -> Iterator[StopRequest]:
    """Let the first signal ask to stop, and the second stop at once: --resume mends both.

    A command's process then ends as by a crash. In Python RunStop is raised, which leaves the block as a
    KeyboardInterrupt after Ctrl-C. Forked processes don't do this: SIGTERM ends them, and they ignore Ctrl-C. Outside
    of `StopRequest.working` the first signal raises RunStop; a failure of the user's code after a signal does so, too.
    At the first signal `working` or `idle` is shown. In another thread than the main thread signals are left alone.
    """
    request, process = StopRequest(), os.getpid()
    in_command = signal.getsignal(signal.SIGINT) is raise_run_stop
    if threading.current_thread() is not threading.main_thread():
        show("signals are left alone outside the main thread: Ctrl-C and SIGTERM do not save a checkpoint here")
        yield request
        return
    words: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def show_all() -> None:
        while (text := words.get()) is not None:
            show(text)

    def receive(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        is_second, request.signal_number = request.requested, number
        if is_second and in_command:
            end_at_once(request.exit_code)
        if not is_second:
            words.put(working if request.has_work else idle)
        if is_second or not request.has_work:
            raise RunStop(request.exit_code)

    def stopped() -> BaseException:
        is_interrupt = request.signal_number == signal.SIGINT and not in_command
        return KeyboardInterrupt(f"stopped at once ({_RESUME})") if is_interrupt else RunStop(request.exit_code)

    # `receive` does not show its text itself, because it may have interrupted a print of `show`.
    shower = threading.Thread(target=show_all, name="signals", daemon=True)
    shower.start()
    previous = {number: signal.signal(number, receive) for number in _SIGNALS}
    try:
        yield request
    except RunStop:
        raise stopped() from None
    except UserError as problem:
        if not (request.requested and isinstance(problem.__cause__, UserCodeFailed)):
            raise
        # Ctrl-C also reaches processes of the user's code, which then fails.
        words.put(f"stopped at once: {problem}")
        raise stopped() from problem
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
        words.put(None)
        shower.join()


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Collect, within the block, the numbers of Ctrl-C and SIGTERM signals, which have no other effect."""
    asked: list[int] = []
    before = {number: signal.signal(number, lambda n, _: asked.append(n)) for number in _SIGNALS}
    try:
        yield asked
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def end_at_once(code: int) -> NoReturn:
    """End this process at once, and kill the processes that multiprocessing began, which would wait for ever."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)
