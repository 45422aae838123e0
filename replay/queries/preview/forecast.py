"""Batches to come, planned one after another as a run plans them, on a buffer that grows by what they would collect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from replay.config import ReplayConfig, StoredConfig
from replay.mixing.batch_plan import BatchPlan
from replay.mixing.mixer import Mixer, ReplayStarved
from replay.mixing.request import Availability
from replay.queries.filters.query import QueryResult

_LIKELY = 0.5
"""Share of fresh episodes that is taken to succeed where no iteration has shown one."""
_SELF = "self"
_Name = TypeVar("_Name")


@dataclass(frozen=True)
class Horizon:
    """How far batches are planned, and what is assumed on the way."""

    iterations: int = 20
    success: float | None = None
    """Share of fresh episodes that succeed; None: as in the newest iteration."""

    def assuming(self, newest: float | None) -> Horizon:
        """This horizon with a share; `newest` is that of the newest iteration."""
        known = next((share for share in (self.success, newest) if share is not None), _LIKELY)
        return replace(self, success=known)


@dataclass
class ExpectedTasks:
    """The tasks that are taken to come next: those never tried, then those tried longest ago, and round again.

    The order within a pass is the run's own affair, and a curriculum's order is not known here.
    """

    new: int | None
    """Tasks of the pool that were never tried; None: every task is new."""
    tried: Sequence[str] = ()
    """Hashes, the one tried longest ago first."""
    gone_through: int = 0

    @classmethod
    def of(cls, config: StoredConfig, tried: Sequence[str] = ()) -> ExpectedTasks:
        pool = config.task_pool
        if pool != "unlimited":
            return cls(max(0, pool - len(tried)), tried)
        return cls(0, tried) if config.has_rows and tried else cls(None)

    def upcoming(self, count: int) -> list[str]:
        return [self._at(self.gone_through + number) for number in range(count)]

    def _at(self, place: int) -> str:
        if self.new is not None:
            place %= self.new + len(self.tried)
        return f"new {place}" if self.new is None or place < self.new else self.tried[place - self.new]


def new_run(config: StoredConfig, horizon: Horizon = Horizon()) -> QueryResult:
    """The batches of a run that begins with an empty buffer."""
    horizon = horizon.assuming(None)
    mixer = Mixer(config.mix_rule())
    plans = forecast(mixer, config.replay, Availability(), ExpectedTasks.of(config), first=1, horizon=horizon)
    return batches(plans, config, first=1, horizon=horizon)


def batches(plans: Iterator[BatchPlan], config: StoredConfig, *, first: int, horizon: Horizon) -> QueryResult:
    """The plans from iteration `first` on in numbers, as many as the run has left but at least one."""
    found: list[QueryResult] = []
    stopped = None
    try:
        for plan in islice(plans, max(1, min(horizon.iterations, config.run.iterations - first + 1))):
            found.append({"iteration": first + len(found), **numbers(plan)})
    except ReplayStarved as error:
        stopped = str(error)
    return {"success": horizon.success, "batches": found, "stopped": stopped}


def numbers(plan: BatchPlan) -> QueryResult:
    """How many rows and groups a plan has: [size, number] of groups, [members, number] of what is replayed in them."""
    sizes = Counter(size for _, size in plan.groups)
    members = Counter(pick.count for pick in plan.picks if pick.task is not None)
    names = ("fraction", "planned_fresh", "planned_replay", "fresh", "replay", "shortfall", "starved_groups")
    return {name: getattr(plan, name) for name in names} | {
        "groups": [list(pair) for pair in sorted(sizes.items(), reverse=True)],
        "members": [list(pair) for pair in sorted(members.items(), reverse=True)],
    }


def forecast(
    mixer: Mixer, replay: ReplayConfig, available: Availability, tasks: ExpectedTasks, *, first: int, horizon: Horizon
) -> Iterator[BatchPlan]:
    """The plans of iteration `first` and those after it, without end. Raises ReplayStarved.

    What the iterations between would collect is made up: a share of each fresh group succeeds, and those rows (all of
    them without `replay.successful_only`) can be drawn from the next iteration on; what failed ones would have solved
    instead is not. Rows never grow too old or wear out,
    and their effective sample size stays above the controller's floor.
    """
    success, rounded_off = horizon.success or 0.0, 0.0
    by_task, by_source_task = dict(available.by_task), dict(available.by_source_task)
    grows = not replay.sources or _SELF in replay.sources
    while True:
        plan = mixer.plan(iteration=first, available=available, tasks=tasks.upcoming(mixer.num_tasks))
        yield plan
        collected = tasks.upcoming(plan.num_tasks)
        rows, own, groups = available.rows, available.by_source.get(_SELF, 0), Counter[int]()
        for slot, size in plan.groups if grows else ():
            successful = round(size * success + rounded_off)
            rounded_off += size * success - successful
            usable = successful if replay.successful_only else size
            groups[size] += usable == size
            usable = min(usable, replay.per_group or usable)
            rows += _add(by_task, collected[slot], usable, most=replay.per_task)
            own += _add(by_source_task, (_SELF, collected[slot]), usable, most=replay.per_task)
        available = replace(
            available,
            rows=rows,
            by_source={**available.by_source, _SELF: own},
            by_task=by_task,
            by_source_task=by_source_task,
            groups=groups + Counter(available.groups),
            by_source_groups=Counter({(_SELF, size): count for size, count in groups.items()})
            + Counter(available.by_source_groups),
        )
        tasks.gone_through += plan.num_tasks
        mixer.feed(success_rate=horizon.success if plan.fresh else None, ess_by_age={})
        first += 1


def _add(counts: dict[_Name, int], name: _Name, rows: int, *, most: int | None) -> int:
    """Add rows up to the cap; how many there was room for."""
    before = counts.get(name, 0)
    counts[name] = before + rows if most is None else min(before + rows, most)
    return counts[name] - before
