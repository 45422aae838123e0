"""The state of a loop between iterations: its progress, and the order of tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from pydantic import TypeAdapter

from agentloop.config import RunConfig
from agentloop.config.sections.run_section import RunSection
from agentloop.runs.confidence_intervals import wilson


@dataclass
class EnvironmentTurns:
    """Decides which environment is next. None gets a whole group more or less than its share.

    An environment is next if it is not ahead of its share, and needs a group soonest (earliest deadline first: Liu and
    Layland 1973). With the shares 1/2, 1/4 and 1/4, environments a, b and c get groups in the order a, b, a, c.
    """

    shares: list[str]
    """Shares as exact fractions, in the order of the configuration."""
    group_size: int
    tasks: list[int]
    """Number of tasks that each environment has given."""
    episodes: list[int]
    """Number of episodes collected in each environment."""

    @classmethod
    def begin(cls, shares: Sequence[float], group_size: int) -> EnvironmentTurns:
        """`shares` are weights: 2, 1 and 1 mean a half and two quarters."""
        weights = [Fraction(repr(share)) for share in shares]
        exact = [str(weight / sum(weights)) for weight in weights]
        return cls(exact, group_size, [0] * len(exact), [0] * len(exact))

    def upcoming(self, count: int) -> list[int]:
        """Return the numbers of the next `count` tasks, if each has a whole group of episodes."""
        tasks, episodes = list(self.tasks), list(self.episodes)
        numbers = []
        for _ in range(count):
            turn = self._next(episodes)
            numbers.append(tasks[turn] * len(tasks) + turn)
            tasks[turn] += 1
            episodes[turn] += self.group_size
        return numbers

    def _next(self, episodes: Sequence[int]) -> int:
        shares, after = [Fraction(share) for share in self.shares], sum(episodes) + self.group_size
        behind = [turn for turn, share in enumerate(shares) if episodes[turn] < share * after]
        return min(behind, key=lambda turn: (episodes[turn] + self.group_size) / shares[turn])

    def planned(self, numbers: Sequence[int], groups: Iterable[tuple[int, int]]) -> Counter[int]:
        """Count episodes by environment. A group is a position in `numbers` and a number of episodes."""
        found = Counter[int]()
        for position, size in groups:
            found[numbers[position] % len(self.tasks)] += size
        return found

    def advance(self, numbers: Iterable[int], collected: Mapping[int, int]) -> None:
        """Note that the tasks of these numbers were in a batch; `collected` counts episodes by environment."""
        for number in numbers:
            task, turn = divmod(number, len(self.tasks))
            self.tasks[turn] = max(self.tasks[turn], task + 1)
        for turn, count in collected.items():
            self.episodes[turn] += count


@dataclass
class TaskQueue:
    """The order in which training tasks come, by number."""

    next: int = 0
    """The first task that has never been in a batch, for a run with one environment."""
    pending: list[int] = field(default_factory=list)
    """Tasks planned for a batch that then had no row of theirs, because replayed rows could not be drawn."""
    turns: EnvironmentTurns | None = None
    """None: the run has one environment."""

    def upcoming(self, count: int) -> list[int]:
        """Return the next `count` tasks; pending ones come first."""
        new = range(self.next, self.next + count) if self.turns is None else self.turns.upcoming(count)
        return [*self.pending, *new][:count]

    def advance(
        self,
        indices: Collection[int],
        *,
        without_member: Collection[int] = (),
        collected: Callable[[EnvironmentTurns], Mapping[int, int]] = lambda turns: {},
    ) -> None:
        """Note that tasks were in a batch, except those `without_member`; `collected` counts by environment."""
        if self.turns is None:
            self.next = max(self.next, 1 + max(indices, default=-1))
        else:
            self.turns.advance(indices, collected(self.turns))
        self.pending = [*sorted(without_member), *(index for index in self.pending if index not in indices)]


@dataclass(frozen=True)
class BestPolicy:
    """The policy with the best held-out success so far, and the interval of its success."""

    iteration: int
    success: float
    low: float
    high: float
    tasks: int


@dataclass
class LoopState:
    """The loop's own part of a checkpoint."""

    iteration: int = 0
    """Number of committed iterations."""
    tasks: TaskQueue = field(default_factory=TaskQueue)
    attempt: int = 0
    """Part of the ids of collected rows: a resumed run must not reuse the ids of its orphans."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(iteration, held-out success), oldest first."""
    held_out_tasks: int = 0
    """Number of tasks of the newest evaluation."""
    best: BestPolicy | None = None
    """None: nothing was evaluated yet."""
    without_better: int = 0
    """Number of evaluations in a row that were not better than all before them."""
    batches: int = 0
    """Number of workers' batches that were learned from or lost."""

    def add_evaluation(self, success: float, tasks: int) -> None:
        """Note an evaluation of the present policy, which is the best one if none has a higher middle of its interval.

        Middles are compared because engines may fail tasks, which do not count: one of few tasks is nearer to 0.5.
        """
        found, best = wilson(success * tasks, tasks), self.best
        ahead = math.inf if best is None else found.low + found.high - (best.low + best.high)
        self.evaluations.append((self.iteration, success))
        self.held_out_tasks = tasks
        self.without_better = 0 if ahead > 0 else self.without_better + 1
        if ahead >= 0:
            self.best = BestPolicy(self.iteration, success, found.low, found.high, tasks)

    @property
    def best_name(self) -> str:
        """The name of the folder with the best policy's weights; empty if there is none."""
        return "" if self.best is None else f"{self.best.iteration:06d}"

    def end(self, run: RunSection) -> tuple[str, str] | None:
        """Why no iteration follows, and the setting with which one would; None if one does."""
        last_two, target = [success for _, success in self.evaluations[-2:]], run.stop_at_success
        if self.iteration >= run.iterations:
            return "all iterations are made", "run.iterations=NUMBER"
        if target is not None and len(last_two) == 2 and min(last_two) >= target:
            why = f"held-out success reached run.stop_at_success={target} in two evaluations in a row"
            return why, "run.stop_at_success=null"
        if run.patience is not None and self.without_better >= run.patience:
            why = f"{self.without_better} evaluations in a row were not better than the best (run.patience)"
            return why, "run.patience=null"
        return None

    @classmethod
    def first(cls, config: RunConfig) -> LoopState:
        """The state before the first iteration."""
        shares = [part.share for part in config.parts]
        turns = EnvironmentTurns.begin(shares, config.batch.group_size) if config.environments else None
        return cls(tasks=TaskQueue(turns=turns))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> LoopState:
        """The state of a checkpoint."""
        return TypeAdapter(cls).validate_python(values)
