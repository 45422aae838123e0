"""What people watch while a run goes: live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from context.wording import visible_lines

_OF_EVERY_ITERATION = ("collect", "update")
_LONGEST_SILENCE = 15.0
"""Seconds after which a plain display says how far a long phase has come."""


class RunDisplay(Protocol):
    """What shows people how a run goes."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Something long is going on: `done` of `total` (episodes, updates, ...)."""

    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        """An iteration has been committed."""

    def note(self, text: str) -> None:
        """A message on a line of its own."""

    def close(self) -> None: ...


def open_display(*, stderr: bool = False) -> RunDisplay:
    """`stderr` leaves stdout to what a program reads."""
    # A notebook says that it is a terminal, but redraws nothing; and rich would make a block of HTML of every line.
    terminal = False if Console().is_jupyter else None
    console = Console(highlight=False, soft_wrap=True, stderr=stderr, force_jupyter=False, force_terminal=terminal)
    return LiveDisplay(console) if console.is_interactive else PlainDisplay(console)


def percent(share: float) -> str:
    """0.172 as `17.2 %`."""
    return f"{share:.1%}".replace("%", " %")


def time_left(seconds: float, done: int, total: int) -> str:
    """What the rest takes at the pace so far; an upper bound, for warm-ups and runs may end early."""
    left = int(seconds / done * (total - done))
    return f"left <= {left // 60}:{left % 60:02d}"


class _RunClock:
    """The pace of the iterations this process made; a resumed run made others before."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._before: int | None = None

    def phase(self, name: str) -> bool:
        """Whether the phase is one of those before the first iteration, whose time does not count."""
        starting = self._before is None and name not in _OF_EVERY_ITERATION
        if starting:
            self._began = self._clock()
        return starting

    def left(self, number: int, total: int) -> str:
        if self._before is None:
            self._before = number - 1
        return time_left(self._clock() - self._began, number - self._before, total - self._before)


def describe_iteration(number: int, total: int, metrics: Mapping[str, float], left: str) -> str:
    """The figures of one iteration in one line."""
    known, parts = metrics.get, [f"iteration {number}/{total}"]
    if "rollout/success" in metrics:  # absent when the whole batch came from the buffer
        parts.append(f"success {percent(metrics['rollout/success'])}")
    replayed, ruled = metrics["batch/replay"], metrics["batch/planned_replay"]
    of_ruled = f" of {ruled:.0f}" if replayed < ruled else ""  # the buffer could not give the rest
    parts.append(f"fresh {metrics['batch/fresh']:.0f} + replay {replayed:.0f}{of_ruled}")
    if lost := known("rollout/engine_failures"):
        parts.append(f"{lost:.0f} lost to the engine")
    if failed := known("rollout/failed_calls"):
        parts.append(f"failed tool calls {percent(failed)}")
    if (ess := known("actor/replay/ess")) is not None:
        parts.append(f"replay ESS {ess:.2f}")
    if (success := known("eval/success")) is not None:
        parts.append(f"held-out {percent(success)}")
    return "  ".join([*parts, f"{metrics['speed/tokens_per_second']:,.0f} tokens/s", left])


class PlainDisplay:
    """For logs and pipes: a line per iteration, and now and then one about a phase that takes long."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._run = _RunClock(clock)
        self._phase = ""
        self._phase_began = self._shown_at = clock()
        self._phase_done = 0

    def phase(self, name: str, done: int, total: int) -> None:
        starting, now = self._run.phase(name), self._clock()
        if name != self._phase:
            self._phase, self._phase_began, self._phase_done = name, now, done
            if starting:
                self.note(f"{name} ...")
        elif self._phase_done < done < total and now - self._shown_at >= _LONGEST_SILENCE:
            first = self._phase_done  # what a resumed training had done before
            self.note(f"{name} {done}/{total}  {time_left(now - self._phase_began, done - first, total - first)}")

    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        self._phase = ""
        self.note(describe_iteration(number, total, metrics, self._run.left(number, total)))

    def note(self, text: str) -> None:
        self._console.print(visible_lines(text), markup=False)
        self._shown_at = self._clock()

    def close(self) -> None:
        return


class LiveDisplay:
    """For terminals: a bar for the phase, a bar for the run, and the last iteration's figures."""

    def __init__(self, console: Console) -> None:
        self._run_clock = _RunClock(time.monotonic)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn(), console=console
        )
        self._name = "starting"
        self._phase: TaskID = self._progress.add_task(self._name, total=None)
        self._run: TaskID | None = None
        self._progress.start()

    def phase(self, name: str, done: int, total: int) -> None:
        self._run_clock.phase(name)
        if name != self._name:
            self._name = name
            self._progress.reset(self._phase)
        self._progress.update(self._phase, description=f"{name} {done}/{total}", completed=done, total=total)

    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        line = describe_iteration(number, total, metrics, self._run_clock.left(number, total))
        if self._run is None:
            self._run = self._progress.add_task(line, total=total)
        self._progress.update(self._run, description=line, completed=number)

    def note(self, text: str) -> None:
        self._progress.console.print(visible_lines(text), markup=False)

    def close(self) -> None:
        self._progress.update(self._phase, visible=self._run is None)  # after a run its last phase says nothing
        self._progress.stop()
