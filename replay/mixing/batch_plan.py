"""The plan of one iteration's batch: which groups are collected, and which rows are drawn from the buffer.

The plan is a deterministic function of the rule, the upcoming tasks and the available rows. The same calls in the same
order give the same plans on any machine. Example: 24 trajectories in groups of 4 with `replay.fraction: 0.5` and the
unit `any` give 3 fresh groups and one pick of 12 rows.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from replay.mixing.apportion import Remainders, group_sizes
from replay.mixing.mix_settings import SAME_TASK, MixRule, Unit
from replay.mixing.request import Availability, Pick

_STATE = {"started": bool, "success_reached": bool, "starved_iterations": int}
"""Attributes of a mixer that are part of its state, with their types."""
_ALL = None
"""Stands for a source's name where rows of any source fit."""


@dataclass(frozen=True)
class BatchPlan:
    """One iteration's batch, counted in trajectories. "Planned" counts ignore what the buffer lacks."""

    planned_fresh: int
    """Fresh rows by the rule: after its start and rounding."""
    planned_replay: int
    planned_sources: Mapping[str, int]
    """Replayed rows of each declared source by the rule."""
    groups: tuple[tuple[int, int], ...]
    """(slot, size) of every group to collect; slots count the iteration's tasks from 0."""
    num_tasks: int
    """Number of slots, which is the number of tasks that the iteration uses up. A wholly replayed slot has no group."""
    picks: tuple[Pick, ...]
    starved_groups: int
    """Number of groups for which the buffer had too few members."""
    fraction: float = 0.0
    """`replay.fraction` for this iteration, along its schedule."""

    @property
    def fresh(self) -> int:
        """Number of trajectories to collect."""
        return sum(size for _, size in self.groups)

    @property
    def replay(self) -> int:
        """Number of trajectories to draw."""
        return sum(pick.count for pick in self.picks)

    @property
    def shortfall(self) -> int:
        """Number of planned replayed rows that the buffer can't give."""
        return self.planned_replay - self.replay


class Mixer:
    """A mixer plans batches by one rule, iteration after iteration. Its state belongs in the checkpoint."""

    def __init__(self, rule: MixRule) -> None:
        self.rule = rule
        self.started = False
        self.success_reached = False
        self.starved_iterations = 0
        self._remainders = Remainders()

    @property
    def num_tasks(self) -> int:
        """The number of upcoming tasks that `plan` needs; 0 for units that don't depend on tasks."""
        return self.rule.num_groups if self.rule.unit in SAME_TASK else 0

    def plan(self, *, iteration: int, available: Availability, tasks: Sequence[str] = ()) -> BatchPlan:
        """Plan the batch of 1-based `iteration`. Call it once per iteration, in order.

        `tasks` are the hashes of the next `num_tasks` tasks. Remainders of roundings are carried over, so that sums
        over iterations follow the declared shares. Rows that the buffer lacks are not carried over.
        """
        if len(tasks) != self.num_tasks:
            raise ValueError(f"tasks must be the next {self.num_tasks}, got {len(tasks)}.")
        configured = self.rule.fraction_at(iteration)
        self.started = self.started or self._starts(iteration, available)
        share = Fraction(configured) if self.started else Fraction(0)
        composition = _Composition(self.rule, share, Stock(available), tasks, self._remainders)
        plan = replace(composition.compose(), fraction=configured)
        self.starved_iterations += plan.shortfall > 0
        return plan

    def observe_iteration(self, *, success_rate: float | None) -> None:
        """Tell the start rule an iteration's success rate (None: no fresh episodes)."""
        wanted = self.rule.start.success_rate
        if wanted is not None and success_rate is not None and success_rate >= wanted:
            self.success_reached = True

    def state(self) -> dict[str, Any]:
        """Return the exact state as plain JSON values, for the checkpoint."""
        numbers = {name: getattr(self, name) for name in _STATE}
        return {"unit": self.rule.unit, **numbers, "remainders": self._remainders.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Raises ValueError for a state of another unit, because its remainders mean something
        else."""
        if state["unit"] != self.rule.unit:
            raise ValueError(
                f"replay.unit must be the unit of the saved state ({state['unit']}), got {self.rule.unit}. "
                f"Set replay.unit: {state['unit']}, or start a new run."
            )
        for name, kind in _STATE.items():
            setattr(self, name, kind(state[name]))
        self._remainders.load_state(state["remainders"])

    def _starts(self, iteration: int, available: Availability) -> bool:
        start = self.rule.start
        return (
            iteration >= start.iteration
            and (start.success_rate is None or self.success_reached)
            and available.rows >= start.buffer
        )


@dataclass
class Stock:
    """The rows that are left in the buffer while one batch is planned. No row is given twice."""

    available: Availability
    taken: Counter[str | None] = field(default_factory=Counter)
    """Number of rows given, by task. None counts rows of any task."""
    taken_from: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    """Number of rows given, by source and task."""

    def count_rows(self, source: str | None, task: str | None = None) -> int:
        """Count the rows that are left of a source (None: any) and a task (None: any). No row is counted twice."""
        stored = self.available
        left = (stored.rows if task is None else stored.by_task.get(task, 0)) - self.taken[task]
        if source is None:
            return left
        own = stored.by_source.get(source, 0) if task is None else stored.by_source_task.get((source, task), 0)
        return min(left, own - self.taken_from[source, task])

    def take_rows(self, wanted: int, source: str | None, task: str | None = None) -> int:
        given = min(wanted, self.count_rows(source, task))
        self.taken[task] += given
        if source is not None:
            self.taken_from[source, task] += given
        return given

    def take_groups(self, wanted: int, source: str | None, size: int) -> int:
        stored = self.available
        left = stored.groups.get(size, 0) - self.taken[None]
        own = left if source is None else stored.by_source_groups.get((source, size), 0)
        given = min(wanted, left, own)
        self.taken[None] += given
        return given


@dataclass(frozen=True)
class _Composition:
    """A batch of which `share` is replayed, rounded with the remainders of earlier batches."""

    rule: MixRule
    share: Fraction
    stock: Stock
    tasks: Sequence[str]
    remainders: Remainders

    def compose(self) -> BatchPlan:
        by_unit: Mapping[Unit, Callable[[], BatchPlan]] = {
            "any": self._replay_single_rows,
            "group": self._replay_whole_groups,
            "trajectory": self._replay_some_of_every_group,
            "task": self._replay_some_groups,
        }
        return by_unit[self.rule.unit]()

    def _replay_single_rows(self) -> BatchPlan:
        ruled = self._ruled(self.rule.trajectories, self.share)
        sources = self._by_source(ruled)
        picks = _picks(Pick(self.stock.take_rows(count, source), source) for source, count in sources.items())
        sizes = group_sizes(self._fresh_part(self.rule.trajectories, ruled, picks), self.rule.group_size)
        return self._plan(sources, picks, list(enumerate(sizes)), num_tasks=len(sizes))

    def _replay_whole_groups(self) -> BatchPlan:
        size = self.rule.group_size
        ruled = self._ruled(self.rule.num_groups, self.share)
        sources = self._by_source(ruled)
        given = {source: self.stock.take_groups(count, source, size) for source, count in sources.items()}
        picks = _picks(Pick(count * size, source, unit="group", size=size) for source, count in given.items())
        sizes = group_sizes(self._fresh_part(self.rule.trajectories, ruled * size, picks), size)
        planned = {source: count * size for source, count in sources.items()}
        starved = ruled - sum(given.values())
        return self._plan(planned, picks, list(enumerate(sizes)), num_tasks=len(sizes), starved_groups=starved)

    def _replay_some_of_every_group(self) -> BatchPlan:
        """Give all groups equally many replayed members. Odd members go to groups whose task has them stored."""
        least, extra = divmod(self._ruled(self.rule.trajectories, self.share), len(self.tasks))
        scarce = Counter[str]()
        rich = []
        for slot, task in enumerate(self.tasks):
            scarce[task] += least + 1  # the same task may fill two slots of one batch
            rich.append((self._stored(task) < scarce[task], slot))
        more = {slot for _, slot in sorted(rich)[:extra]}
        return self._same_task([least + (slot in more) for slot in range(len(self.tasks))])

    def _replay_some_groups(self) -> BatchPlan:
        """Give some groups `task_members` replayed members, and the others none. Groups with stored rows come first."""
        mixed_members = self.rule.task_members or self.rule.group_size
        mixed_share = min(Fraction(1), self.share * self.rule.group_size / mixed_members)
        mixed = self._ruled(len(self.tasks), mixed_share)
        wanted = Counter[str]()
        rich = []
        for slot, task in enumerate(self.tasks):
            missing = wanted[task] + mixed_members - self._stored(task)
            wanted[task] += mixed_members
            rich.append((max(0, missing), slot))
        chosen = {slot for _, slot in sorted(rich)[:mixed]}
        return self._same_task([mixed_members * (slot in chosen) for slot in range(len(self.tasks))])

    def _same_task(self, members: Sequence[int]) -> BatchPlan:
        """Plan groups of the rule's size, of which `members[slot]` are replayed rows of the slot's task."""
        groups: list[tuple[int, int]] = []
        picks: list[Pick] = []
        planned = Counter[str | None]()
        starved = 0
        for slot, (task, wanted) in enumerate(zip(self.tasks, members, strict=True)):
            sources = self._by_source(wanted)
            planned.update(sources)
            mine = _picks(Pick(self.stock.take_rows(n, source, task), source, task) for source, n in sources.items())
            picks += mine
            starved += sum(pick.count for pick in mine) < wanted
            if size := self._fresh_part(self.rule.group_size, wanted, mine):
                groups.append((slot, size))
        return self._plan(planned, picks, groups, num_tasks=len(self.tasks), starved_groups=starved)

    def _ruled(self, total: int, share: Fraction) -> int:
        _, ruled = self.remainders.split("replay", total, [1 - share, share])
        return ruled

    def _stored(self, task: str) -> int:
        return sum(self.stock.count_rows(source, task) for source in self.rule.sources or [_ALL])

    def _by_source(self, total: int) -> dict[str | None, int]:
        if not self.rule.sources:
            return {_ALL: total}
        parts = self.remainders.split("sources", total, list(self.rule.sources.values()))
        return dict(zip(self.rule.sources, parts, strict=True))

    def _fresh_part(self, whole: int, ruled: int, picks: Sequence[Pick]) -> int:
        """Count the fresh rows of a batch or group of `whole` rows; the rule asks for `ruled` replayed ones."""
        drawn = sum(pick.count for pick in picks)
        if self.rule.mode == "observe":
            return whole
        if self.rule.shortfall == "shrink" and whole - ruled + drawn > 0:
            return whole - ruled
        # A batch or group that would be empty is not shrunk either, so that no task and no update is dropped.
        return whole - drawn

    def _plan(
        self,
        planned: Mapping[str | None, int],
        picks: Sequence[Pick],
        groups: Sequence[tuple[int, int]],
        *,
        num_tasks: int,
        starved_groups: int = 0,
    ) -> BatchPlan:
        ruled = sum(planned.values())
        return BatchPlan(
            planned_fresh=self.rule.trajectories - (0 if self.rule.mode == "observe" else ruled),
            planned_replay=ruled,
            planned_sources={source: count for source, count in planned.items() if source is not None},
            groups=tuple(groups),
            num_tasks=num_tasks,
            picks=tuple(picks),
            starved_groups=starved_groups,
        )


def _picks(picks: Iterable[Pick]) -> list[Pick]:
    return [pick for pick in picks if pick.count]
