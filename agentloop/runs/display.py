"""The progress of a run as lines of text: one for each iteration, and some about phases that take long."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, TextIO

from agentloop.runs.confidence_intervals import wilson
from context.wording import visible_lines

_FAMILIAR_PHASES = ("collect", "update", "checkpoint", "report")


class RunDisplay(Protocol):
    """Shows people the progress of a run."""

    def phase(self, name: str, done: int, total: int, tokens: Callable[[], int] | None = None) -> None:
        """Note that a long phase has come to `done` of `total` (episodes, updates, ...).

        `tokens` counts the tokens sampled so far, which shows that work is done before the first episode has ended.
        """

    def iteration(self, number: int, total: int, metrics: Mapping[str, float], *, left: float) -> None:
        """Show a committed iteration. `left` is the estimate of the run's remaining seconds."""

    def note(self, text: str) -> None:
        """Show a message on a line of its own."""


def percent(share: float) -> str:
    """Write 0.172 as `17.2 %`."""
    return f"{share:.1%}".replace("%", " %")


def with_interval(share: float, tasks: int) -> str:
    """Write 0.317 of 60 tasks as `31.7 % (21-44)`, with Wilson's 95 % interval for one sample per task."""
    found = wilson(share * tasks, tasks)
    return f"{percent(share)} ({100 * found.low:.0f}-{100 * found.high:.0f})"


def duration(seconds: float) -> str:
    """Write 75 seconds as `1:15`, an hour more as `1:01:15`."""
    return str(timedelta(seconds=int(seconds))).removeprefix("0:").removeprefix("0")


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
    if unknown := known("rollout/not_judged"):
        parts.append(f"{unknown:.0f} not judged")
    if failed := known("rollout/failed_calls"):
        parts.append(f"failed tool calls {percent(failed)}")
    if (ess := known("actor/replay/ess")) is not None:
        parts.append(f"replay ESS {ess:.2f}")
    if (success := known("eval/success")) is not None:
        parts.append(f"held-out {with_interval(success, round(metrics['eval/tasks']))}")
    return "  ".join([*parts, f"{metrics['speed/tokens_per_second']:,.0f} tokens/s", left])


class ConsoleDisplay:
    """Prints plain lines, for terminals, logs and pipes."""

    silence = 15.0
    """Seconds without a line after which the progress of a phase is shown."""

    def __init__(
        self, *, stderr: bool = False, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """With `stderr`, stdout is left to output for programs. `file` gets the lines instead of both."""
        self._file, self._stderr, self._clock = file, stderr, clock
        self._phase_began = self._shown_at = clock()
        self._phase, self._first, self._done, self._total = "", 0, 0, 0
        self._tokens: Callable[[], int] | None = None
        self._quiet = False
        """Whether an iteration has ended: later phases begin without a line."""

    def phase(self, name: str, done: int, total: int, tokens: Callable[[], int] | None = None) -> None:
        if name != self._phase or done < self._done:  # another round of the same phase
            self._phase, self._phase_began, self._first = name, self._clock(), done
            if not (self._quiet or name in _FAMILIAR_PHASES):
                self.note(f"{name} ...")
        self._done, self._total, self._tokens = done, total, tokens
        self.look()

    def look(self) -> None:
        """Show the progress of the present phase, unless a line was shown just now."""
        now, quiet_since = self._clock(), max(self._shown_at, self._phase_began)
        if self._done >= self._total or now - quiet_since < self.silence:
            return
        seconds, done = now - self._phase_began, self._done - self._first  # without progress before a resume
        # An upper bound: warm-ups and runs may end early.
        rest = f"{self.tokens_within(seconds)}for {duration(seconds)}"
        if done > 0:
            left = duration(seconds / done * (self._total - self._done))
            rest = f"{60 * done / seconds:,.1f} per minute  left <= {left}"
        self.note(f"{self._phase} {self._done}/{self._total}  {rest}")

    def tokens_within(self, seconds: float) -> str:
        """Write the tokens that the present phase has sampled so far; an empty text for none."""
        tokens = 0 if self._tokens is None else self._tokens()
        return f"{tokens:,} tokens, {tokens / seconds:,.1f} per second  " if tokens and seconds else ""

    def close(self) -> None:
        """End what is drawn over and over; printed lines stay as they are."""

    def iteration(self, number: int, total: int, metrics: Mapping[str, float], *, left: float) -> None:
        self._phase, self._total, self._quiet = "", 0, True
        rest = f"left <= {duration(left)}" if number < total else "to be saved"
        self.note(describe_iteration(number, total, metrics, rest))

    def note(self, text: str) -> None:
        file = self._file or (sys.stderr if self._stderr else sys.stdout)
        print(f"{visible_lines(text)}\n", end="", file=file, flush=True)  # in one piece, because several threads print
        self._shown_at = self._clock()


@contextmanager
def showing_progress(display: RunDisplay) -> Iterator[None]:
    """Let a console display show progress from a thread, within the block, while no episode or update ends."""
    if not isinstance(display, ConsoleDisplay):
        yield
        return
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(display.silence / 5):
            display.look()

    thread = threading.Thread(target=look, name="display", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        display.close()
