"""The four units: from a share of the batch to groups to collect and rows to draw, given what the buffer has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from replay.mixing.apportion import Remainders, group_sizes
from replay.mixing.request import Availability, Pick
from replay.mixing.rule import BatchPlan, MixRule, Unit

_ALL = None
"""In place of a source's name: whatever the sampler takes."""


@dataclass
class Stock:
    """What is left of the buffer while one batch is planned; nothing is given twice."""

    available: Availability
    taken: Counter[str | None] = field(default_factory=Counter)
    """Rows given, by task; None: of any task."""
    taken_from: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    """The same by source."""

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


Compose = Callable[[MixRule, Fraction, Stock, Sequence[str], Remainders], BatchPlan]


def compose(
    rule: MixRule, share: Fraction, available: Availability, tasks: Sequence[str], remainders: Remainders
) -> BatchPlan:
    """A batch of which `share` is replayed, rounded with what earlier batches left over."""
    return _UNITS[rule.unit](rule, share, Stock(available), tasks, remainders)


def _single_rows(
    rule: MixRule, share: Fraction, stock: Stock, tasks: Sequence[str], remainders: Remainders
) -> BatchPlan:
    _, ruled = remainders.split("replay", rule.trajectories, [1 - share, share])
    sources = _by_source(rule, ruled, remainders)
    picks = _picks(Pick(stock.take_rows(count, source), source) for source, count in sources.items())
    sizes = group_sizes(_fresh_part(rule, rule.trajectories, ruled, picks), rule.group_size)
    return _plan(rule, sources, picks, list(enumerate(sizes)), num_tasks=len(sizes))


def _whole_groups(
    rule: MixRule, share: Fraction, stock: Stock, tasks: Sequence[str], remainders: Remainders
) -> BatchPlan:
    size = rule.group_size
    _, ruled = remainders.split("replay", rule.num_groups, [1 - share, share])
    sources = _by_source(rule, ruled, remainders)
    given = {source: stock.take_groups(count, source, size) for source, count in sources.items()}
    picks = _picks(Pick(count * size, source, unit="group", size=size) for source, count in given.items())
    sizes = group_sizes(_fresh_part(rule, rule.trajectories, ruled * size, picks), size)
    planned = {source: count * size for source, count in sources.items()}
    starved = ruled - sum(given.values())
    return _plan(rule, planned, picks, list(enumerate(sizes)), num_tasks=len(sizes), starved_groups=starved)


def _some_of_every_group(
    rule: MixRule, share: Fraction, stock: Stock, tasks: Sequence[str], remainders: Remainders
) -> BatchPlan:
    """Every group has as many replayed members as any other, or one more, which goes where the buffer has one."""
    _, ruled = remainders.split("replay", rule.trajectories, [1 - share, share])
    least, extra = divmod(ruled, len(tasks))
    scarce = Counter[str]()
    rich = []
    for slot, task in enumerate(tasks):
        scarce[task] += least + 1  # the same task may fill two slots of one batch
        rich.append((_stored(rule, task, stock) < scarce[task], slot))
    more = {slot for _, slot in sorted(rich)[:extra]}
    members = [least + (slot in more) for slot in range(len(tasks))]
    return _same_task(rule, members, stock, tasks, remainders)


def _some_groups(
    rule: MixRule, share: Fraction, stock: Stock, tasks: Sequence[str], remainders: Remainders
) -> BatchPlan:
    """`task_members` replayed members in some groups, those first whose task has them stored; none in the others."""
    mixed_members = rule.task_members or rule.group_size
    mixed_share = min(Fraction(1), share * rule.group_size / mixed_members)
    _, mixed = remainders.split("replay", len(tasks), [1 - mixed_share, mixed_share])
    wanted = Counter[str]()
    rich = []
    for slot, task in enumerate(tasks):
        missing = wanted[task] + mixed_members - _stored(rule, task, stock)
        wanted[task] += mixed_members
        rich.append((max(0, missing), slot))
    chosen = {slot for _, slot in sorted(rich)[:mixed]}
    members = [mixed_members * (slot in chosen) for slot in range(len(tasks))]
    return _same_task(rule, members, stock, tasks, remainders)


_UNITS: Mapping[Unit, Compose] = {
    "any": _single_rows,
    "group": _whole_groups,
    "trajectory": _some_of_every_group,
    "task": _some_groups,
}


def _same_task(
    rule: MixRule, members: Sequence[int], stock: Stock, tasks: Sequence[str], remainders: Remainders
) -> BatchPlan:
    """Groups of the stated size, `members[slot]` of each replayed."""
    groups: list[tuple[int, int]] = []
    picks: list[Pick] = []
    planned = Counter[str | None]()
    starved = 0
    for slot, (task, wanted) in enumerate(zip(tasks, members, strict=True)):
        sources = _by_source(rule, wanted, remainders)
        planned.update(sources)
        given = {source: stock.take_rows(count, source, task) for source, count in sources.items()}
        mine = _picks(Pick(count, source, task) for source, count in given.items())
        picks += mine
        starved += sum(given.values()) < wanted
        size = _fresh_part(rule, rule.group_size, wanted, mine)
        if size:
            groups.append((slot, size))
    return _plan(rule, planned, picks, groups, num_tasks=len(tasks), starved_groups=starved)


def _stored(rule: MixRule, task: str, stock: Stock) -> int:
    return sum(stock.rows(source, task) for source in rule.sources or [_ALL])


def _by_source(rule: MixRule, total: int, remainders: Remainders) -> dict[str | None, int]:
    if not rule.sources:
        return {_ALL: total}
    parts = remainders.split("sources", total, list(rule.sources.values()))
    return dict(zip(rule.sources, parts, strict=True))


def _plan(
    rule: MixRule,
    planned: Mapping[str | None, int],
    picks: Sequence[Pick],
    groups: Sequence[tuple[int, int]],
    *,
    num_tasks: int,
    starved_groups: int = 0,
) -> BatchPlan:
    ruled = sum(planned.values())
    return BatchPlan(
        planned_fresh=rule.trajectories - (0 if rule.mode == "observe" else ruled),
        planned_replay=ruled,
        planned_sources={source: count for source, count in planned.items() if source is not None},
        groups=tuple(groups),
        num_tasks=num_tasks,
        picks=tuple(picks),
        starved_groups=starved_groups,
    )


def _picks(picks: Iterable[Pick]) -> list[Pick]:
    return [pick for pick in picks if pick.count]


def _fresh_part(rule: MixRule, whole: int, ruled: int, picks: Sequence[Pick]) -> int:
    """Of a batch or a group of `whole`, of which `ruled` should be replayed and `picks` will be."""
    drawn = sum(pick.count for pick in picks)
    if rule.mode == "observe":
        return whole
    if rule.shortfall == "shrink" and whole - ruled + drawn > 0:
        return whole - ruled
    # Also where shrinking would leave nothing at all: no task of the data set, and no update, is dropped.
    return whole - drawn
