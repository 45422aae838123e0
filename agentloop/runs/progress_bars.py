"""Progress bars of long phases below the lines of a run, where a terminal or a notebook shows them."""

import sys
from collections.abc import Callable
from typing import Any, TextIO

from tqdm.std import tqdm  # type: ignore[import-untyped]

from agentloop.runs.display import ConsoleDisplay

_FORMAT = "{desc} {n_fmt}/{total_fmt} |{bar:30}| {elapsed}{postfix}, left {remaining}"


def open_display(*, stderr: bool = False) -> ConsoleDisplay:
    """Return a display with bars for a terminal or a notebook; with lines alone for files, pipes and logs."""
    stream = sys.stderr if stderr else sys.stdout
    draws = stream.isatty() or type(stream).__module__.startswith("ipykernel.")
    return BarDisplay(stream) if draws else ConsoleDisplay(stderr=stderr)


class BarDisplay(ConsoleDisplay):
    """Draws a phase of several parts as a bar that ends with the phase, in place of lines about its progress."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream)
        self._stream = stream
        self._bar: Any = None

    def phase(self, name: str, done: int, total: int, tokens: Callable[[], int] | None = None) -> None:
        self._tokens = tokens
        if self._bar is not None and (self._bar.desc != name or done < self._bar.n or done >= total):
            self.close()
        if total <= 1:
            super().phase(name, done, total, tokens)
        elif done < total:
            if self._bar is None:
                options = {"file": self._stream, "leave": False, "bar_format": _FORMAT, "smoothing": 0}
                self._bar = tqdm(desc=name, initial=done, total=total, dynamic_ncols=True, **options)
            self._bar.total = total
            self._bar.update(done - self._bar.n)

    def look(self) -> None:
        bar = self._bar  # another thread may close it
        if bar is None:
            super().look()
            return
        seconds, done = bar.format_dict["elapsed"], bar.n - bar.initial
        bar.postfix = f"{60 * done / seconds:,.1f} per minute" if done else self.tokens_within(seconds).strip()
        bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def note(self, text: str) -> None:
        with tqdm.external_write_mode(file=self._stream):
            super().note(text)
