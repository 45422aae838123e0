"""What people watch while a run goes: a line for each iteration, and now and then one about a phase that takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from context.wording import visible_lines

_OF_EVERY_ITERATION = ("collect", "update")
_LONGEST_SILENCE = 15.0
"""Seconds after which a line says how far a long phase has come."""


class RunDisplay(Protocol):
    """What shows people how a run goes."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Something long is going on: `done` of `total` (episodes, updates, ...)."""

    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        """An iteration has been committed."""

    def note(self, text: str) -> None:
        """A message on a line of its own."""


def percent(share: float) -> str:
    """0.172 as `17.2 %`."""
    return f"{share:.1%}".replace("%", " %")


def time_left(seconds: float, done: int, total: int) -> str:
    """What the rest takes at the pace so far; an upper bound, for warm-ups and runs may end early."""
    left = int(seconds / done * (total - done))
    return f"left <= {left // 60}:{left % 60:02d}"


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


class ConsoleDisplay:
    """Plain lines, for terminals, logs and pipes."""

    def __init__(
        self, *, stderr: bool = False, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`stderr` leaves stdout to what a program reads; `file` takes the lines in the place of both."""
        self._file, self._stderr, self._clock = file, stderr, clock
        self._began = self._phase_began = self._shown_at = clock()
        self._before: int | None = None
        """Iterations that earlier processes of the run made; None before this one's first."""
        self._phase, self._phase_done = "", 0

    def phase(self, name: str, done: int, total: int) -> None:
        now, starting = self._clock(), self._before is None and name not in _OF_EVERY_ITERATION
        if starting:
            self._began = now  # what comes before the first iteration says nothing of the pace
        if name != self._phase:
            self._phase, self._phase_began, self._phase_done = name, now, done
            if starting:
                self.note(f"{name} ...")
        elif self._phase_done < done < total and now - self._shown_at >= _LONGEST_SILENCE:
            first = self._phase_done  # what a resumed training had done before
            self.note(f"{name} {done}/{total}  {time_left(now - self._phase_began, done - first, total - first)}")

    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        self._phase = ""
        if self._before is None:
            self._before = number - 1
        left = time_left(self._clock() - self._began, number - self._before, total - self._before)
        self.note(describe_iteration(number, total, metrics, left))

    def note(self, text: str) -> None:
        print(visible_lines(text), file=self._file or (sys.stderr if self._stderr else sys.stdout), flush=True)
        self._shown_at = self._clock()
