"""What tools print is dropped, and what everybody else prints at the same time is not."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from typing import Any, BinaryIO, TextIO, cast

_silent: ContextVar[bool] = ContextVar("silent", default=False)


def silence_this_context() -> None:
    """What this thread, or this asyncio task, prints from now on is dropped within `silenced_tools`."""
    _silent.set(True)


@contextmanager
def silenced_tools() -> Iterator[None]:
    out, err = _Muted(sys.stdout), _Muted(sys.stderr)
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
        yield


class _Muted:
    """Stands in for stdout or stderr."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if _silent.get() else self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> BinaryIO:
        return cast(BinaryIO, _BinarySink()) if _silent.get() else self._stream.buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _BinarySink(io.RawIOBase):
    """Takes bytes and stores none."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes
