"""Ctrl-C and SIGTERM: once, finish the iteration, commit, checkpoint; twice, end at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Asked for by a signal; looked at between iterations."""

    signal_number: int | None = None

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells expect: 130 for Ctrl-C, 143 for SIGTERM; 0 if nobody asked."""
        return 128 + self.signal_number if self.signal_number is not None else 0


@contextmanager
def polite_stop(tell: Callable[[str], None]) -> Iterator[StopRequest]:
    """Within, the first signal asks and the second ends the process as a crash would: --resume mends both."""
    request = StopRequest()

    def receive(number: int, frame: FrameType | None) -> None:
        if request.requested:
            os._exit(128 + number)
        request.signal_number = number
        tell("stopping after this iteration; again to stop at once (--resume continues either way)")

    previous = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
