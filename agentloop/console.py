"""What people watch while a run goes: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class RunDisplay(Protocol):
    def phase(self, name: str, done: int, total: int) -> None:
        """Something long is going on: `done` of `total` (episodes, updates, ...)."""
        ...

    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        """An iteration has been committed."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line of its own."""
        ...

    def close(self) -> None: ...


def open_display() -> RunDisplay:
    console = Console(highlight=False, soft_wrap=True)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class _Clock:
    """Time left, from the mean time of the iterations so far."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def left(self, number: int, total: int) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = (number, now)
            return "?"
        done = number - self._first[0]
        seconds = (now - self._first[1]) / done * (total - number) if done else 0.0
        return f"{int(seconds // 60)}:{int(seconds % 60):02d}"


def describe_iteration(number: int, total: int, metrics: Mapping[str, float], left: str) -> str:
    """The figures of one iteration in one line."""
    parts = [
        f"iteration {number}/{total}",
        f"success {metrics['rollout/success']:.1%}",
        f"fresh {metrics['batch/fresh']:.0f} + replay {metrics['batch/replay']:.0f}",
    ]
    if "actor/replay/ess" in metrics:
        parts.append(f"replay ESS {metrics['actor/replay/ess']:.2f}")
    if "eval/success" in metrics:
        parts.append(f"held-out {metrics['eval/success']:.1%}")
    parts += [f"{metrics['speed/tokens_per_second']:,.0f} tokens/s", f"left <= {left}"]
    return "  ".join(parts)


class PlainDisplay:
    """For logs and pipes: one line per phase and per iteration."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._clock = _Clock()
        self._phase = ""

    def phase(self, name: str, done: int, total: int) -> None:
        if name != self._phase and name not in ("collect", "update"):
            self._console.print(f"{name} ...", markup=False)
        self._phase = name

    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        left = self._clock.left(number, total)
        self._console.print(describe_iteration(number, total, metrics, left), markup=False)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        return


class LiveDisplay:
    """For terminals: a bar for the phase, a bar for the run, and the last iteration's figures."""

    def __init__(self, console: Console) -> None:
        self._clock = _Clock()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn(), console=console
        )
        self._phase: TaskID = self._progress.add_task("starting", total=None)
        self._run: TaskID | None = None
        self._progress.start()

    def phase(self, name: str, done: int, total: int) -> None:
        self._progress.update(self._phase, description=f"{name:<9}", completed=done, total=total)

    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        line = describe_iteration(number, total, metrics, self._clock.left(number, total))
        if self._run is None:
            self._run = self._progress.add_task(line, total=total)
        self._progress.update(self._run, description=line, completed=number)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False)

    def close(self) -> None:
        self._progress.stop()
