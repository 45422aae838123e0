"""Runs a tool in this process and main thread, and ends it when its time is up.

A POSIX timer raises `ToolTimeout` inside the tool. That ends Python code and calls that signals interrupt
(sleep, locks, sockets). It can't end C code that never looks at signals, nor the tool's threads: such tools
need isolation.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from types import FrameType
from typing import Any, BinaryIO, TextIO, TypeVar, cast

from agentloop.environments.tools.results import ToolTimeout

_AGAIN_AFTER_S = 0.05
_SHORTEST_S = 1e-3
"""The timer takes what rounds to 0 for `off`."""
_Result = TypeVar("_Result")
_Handler = Callable[[int, FrameType | None], Any]


def run_with_deadline(call: Callable[[], _Result], *, timeout_s: float) -> _Result:
    """The result of `call`, its prints dropped. Raises ToolTimeout if it took longer, whatever it caught.

    A Ctrl-C or SIGTERM of the user is raised even if the tool swallowed it.
    """
    out, err = _Muted(sys.stdout), _Muted(sys.stderr)
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
        return _run(call, timeout_s)


def _run(call: Callable[[], _Result], timeout_s: float) -> _Result:
    process, tracer = os.getpid(), sys.gettrace()
    alarm, user = _Alarm(), _UserSignals()
    outer_handler = signal.signal(signal.SIGALRM, alarm) or signal.SIG_DFL
    user.watch()
    began = time.monotonic()
    outer_delay, outer_interval = signal.setitimer(signal.ITIMER_REAL, max(timeout_s, _SHORTEST_S), _AGAIN_AFTER_S)
    try:
        return next(_apart(call))
    finally:
        alarm.off = True
        if os.getpid() != process:
            # The tool forked and its child came back here: it must not go on as a second trainer.
            os._exit(os.EX_SOFTWARE)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if alarm.fired > 1:
            sys.settrace(tracer)
        user.restore()
        signal.signal(signal.SIGALRM, outer_handler)
        if outer_delay:
            passed = time.monotonic() - began
            signal.setitimer(signal.ITIMER_REAL, max(outer_delay - passed, 1e-3), outer_interval)
        if user.raised is not None:
            raise user.raised
        if alarm.fired:
            raise ToolTimeout


def _apart(call: Callable[[], _Result]) -> Iterator[_Result]:
    """Yields the result. An exception raised at any line can leave Python (3.11) believing that it is still being
    handled, in all that this thread does later; a generator has such a state of its own, and takes it along."""
    yield call()


class _Alarm:
    """The signal handler: raises inside the tool, again and again for a tool that catches it.

    `while True: try: ... except: pass` would catch every single one, as each arrives inside the `try`. So
    from the second on a trace function raises as well, n lines after the nth alarm: some such line lies
    outside of every `try`.
    """

    def __init__(self) -> None:
        self.off = False
        self.fired = 0

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        # Between the tool's return and `off`, `_run` itself is the interrupted frame: it has to finish.
        if self.off or frame is None or frame.f_code in (*_OURS, _Alarm.__call__.__code__):
            return
        self.fired += 1
        if self.fired > 1:
            self._raise_at_line(self.fired - 1, frame)
        raise ToolTimeout

    def _raise_at_line(self, count: int, frame: FrameType | None) -> None:
        lines_left = count

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines_left
            if event == "line" and not self.off:
                lines_left -= 1
                if lines_left <= 0:
                    raise ToolTimeout
            return trace

        sys.settrace(trace)
        while frame is not None and frame.f_code not in _OURS:
            frame.f_trace = trace
            frame = frame.f_back


_OURS = (_run.__code__, _apart.__code__)


class _UserSignals:
    """Notes what the handlers of Ctrl-C and SIGTERM raise while a tool runs: a tool may catch it."""

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._handlers: dict[int, _Handler] = {}

    def watch(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._relay)

    def restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _relay(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            self.raised = error
            raise


class _Muted:
    """Stands in for stdout or stderr: drops what the tool's thread writes, not a display's thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if self._is_tool() else self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> BinaryIO:
        return cast(BinaryIO, _BinarySink()) if self._is_tool() else self._stream.buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _is_tool(self) -> bool:
        return threading.get_ident() == self._thread


class _BinarySink(io.RawIOBase):
    """Takes bytes and keeps none."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes
