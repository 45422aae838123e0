"""One batch, planned by each of the four units: from its replayed share to groups to collect and rows to draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from replay.mixing.apportion import Remainders, group_sizes
from replay.mixing.mix_settings import MixRule, Unit
from replay.mixing.request import Availability, Pick

_ALL = None
"""In place of a source's name: whatever the sampler takes."""


@dataclass(frozen=True)
class BatchPlan:
    """One iteration's batch in trajectories: what was configured, what the rule makes of it, what there will be."""

    planned_fresh: int
    """Ruled: after start, controller and rounding."""
    planned_replay: int
    planned_sources: Mapping[str, int]
    """Ruled rows of each declared source."""
    groups: tuple[tuple[int, int], ...]
    """(slot, size) of every group to collect; slots count the iteration's tasks from 0."""
    num_tasks: int
    """Slots: tasks the iteration goes through. A slot that is replayed whole has no group to collect."""
    picks: tuple[Pick, ...]
    starved_groups: int
    """Groups for which the buffer had fewer members than ruled."""
    fraction: float = 0.0
    """Configured for this iteration: `replay.fraction` along its schedule."""

    @property
    def fresh(self) -> int:
        """To be collected."""
        return sum(size for _, size in self.groups)

    @property
    def replay(self) -> int:
        """To be drawn."""
        return sum(pick.count for pick in self.picks)

    @property
    def shortfall(self) -> int:
        """Ruled rows the buffer can't give."""
        return self.planned_replay - self.replay


@dataclass
class Stock:
    """What is left of the buffer while one batch is planned; nothing is given twice."""

    available: Availability
    taken: Counter[str | None] = field(default_factory=Counter)
    """Rows given, by task; None: of any task."""
    taken_from: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    """Rows given, by source and task."""

    def rows(self, source: str | None, task: str | None = None) -> int:
        """Left of a task, or of any. A row that two sources' names fit, or that a cap keeps back, is there once."""
        stored = self.available
        left = (stored.rows if task is None else stored.by_task.get(task, 0)) - self.taken[task]
        if source is None:
            return left
        own = stored.by_source.get(source, 0) if task is None else stored.by_source_task.get((source, task), 0)
        return min(left, own - self.taken_from[source, task])

    def take_rows(self, wanted: int, source: str | None, task: str | None = None) -> int:
        given = min(wanted, self.rows(source, task))
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


def compose(
    rule: MixRule, share: Fraction, available: Availability, tasks: Sequence[str], remainders: Remainders
) -> BatchPlan:
    """A batch of which `share` is replayed, rounded with what earlier batches left over."""
    composition = _Composition(rule, share, Stock(available), tasks, remainders)
    by_unit: Mapping[Unit, Callable[[], BatchPlan]] = {
        "any": composition.single_rows,
        "group": composition.whole_groups,
        "trajectory": composition.some_of_every_group,
        "task": composition.some_groups,
    }
    return by_unit[rule.unit]()


@dataclass(frozen=True)
class _Composition:
    """One batch in the making."""

    rule: MixRule
    share: Fraction
    stock: Stock
    tasks: Sequence[str]
    remainders: Remainders

    def single_rows(self) -> BatchPlan:
        ruled = self._ruled(self.rule.trajectories, self.share)
        sources = self._by_source(ruled)
        picks = _picks(Pick(self.stock.take_rows(count, source), source) for source, count in sources.items())
        sizes = group_sizes(self._fresh_part(self.rule.trajectories, ruled, picks), self.rule.group_size)
        return self._plan(sources, picks, list(enumerate(sizes)), num_tasks=len(sizes))

    def whole_groups(self) -> BatchPlan:
        size = self.rule.group_size
        ruled = self._ruled(self.rule.num_groups, self.share)
        sources = self._by_source(ruled)
        given = {source: self.stock.take_groups(count, source, size) for source, count in sources.items()}
        picks = _picks(Pick(count * size, source, unit="group", size=size) for source, count in given.items())
        sizes = group_sizes(self._fresh_part(self.rule.trajectories, ruled * size, picks), size)
        planned = {source: count * size for source, count in sources.items()}
        starved = ruled - sum(given.values())
        return self._plan(planned, picks, list(enumerate(sizes)), num_tasks=len(sizes), starved_groups=starved)

    def some_of_every_group(self) -> BatchPlan:
        """Every group has as many replayed members as any other, or one more, which goes where the buffer has one."""
        least, extra = divmod(self._ruled(self.rule.trajectories, self.share), len(self.tasks))
        scarce = Counter[str]()
        rich = []
        for slot, task in enumerate(self.tasks):
            scarce[task] += least + 1  # the same task may fill two slots of one batch
            rich.append((self._stored(task) < scarce[task], slot))
        more = {slot for _, slot in sorted(rich)[:extra]}
        return self._same_task([least + (slot in more) for slot in range(len(self.tasks))])

    def some_groups(self) -> BatchPlan:
        """`task_members` replayed members in some groups, those first whose task has them stored; else none."""
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
        """Groups of the stated size, `members[slot]` of each replayed."""
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
        return sum(self.stock.rows(source, task) for source in self.rule.sources or [_ALL])

    def _by_source(self, total: int) -> dict[str | None, int]:
        if not self.rule.sources:
            return {_ALL: total}
        parts = self.remainders.split("sources", total, list(self.rule.sources.values()))
        return dict(zip(self.rule.sources, parts, strict=True))

    def _fresh_part(self, whole: int, ruled: int, picks: Sequence[Pick]) -> int:
        """The fresh rows of a batch or a group of `whole`; `ruled` should be replayed and `picks` will be."""
        drawn = sum(pick.count for pick in picks)
        if self.rule.mode == "observe":
            return whole
        if self.rule.shortfall == "shrink" and whole - ruled + drawn > 0:
            return whole - ruled
        # Also where shrinking would leave nothing at all: no task of the data set, and no update, is dropped.
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
