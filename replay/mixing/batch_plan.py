"""What a batch is made of: one explicit, deterministic function of the rule, the tasks at hand and the buffer's stock.

Nothing here is random and nothing is read: the same calls in the same order give the same batches, on any machine.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from replay.errors import ReplayError
from replay.mixing.apportion import Remainders, group_sizes
from replay.mixing.mix_settings import SAME_TASK, MixRule, Unit, progress_at
from replay.mixing.request import Availability, Pick

_STATE = {"started": bool, "success_reached": bool, "factor": float, "starved_iterations": int}
"""What a mixer's state holds next to the unit and the remainders."""
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


class ReplayStarved(ReplayError):
    """The buffer can't give what the rule asks for, and the rule says to stop then."""

    def __init__(self, given: int, ruled: int, iteration: int) -> None:
        super().__init__(
            f"replay.fraction must be what the buffer can give when replay.shortfall is error, got {given} of {ruled} "
            f"rows in iteration {iteration}. Begin later (replay.start.buffer), lower replay.fraction, loosen the "
            "replay limits, or set replay.shortfall: fresh."
        )


class Mixer:
    """Applies one rule, iteration after iteration. Its state belongs in the checkpoint."""

    def __init__(self, rule: MixRule) -> None:
        self.rule = rule
        self.started = False
        self.success_reached = False
        self.factor = 1.0
        """The controller's: the configured fraction is multiplied by it."""
        self.starved_iterations = 0
        self._remainders = Remainders()

    @property
    def num_tasks(self) -> int:
        """How many upcoming tasks `plan` must be given; 0 for units that don't look at them."""
        return self.rule.num_groups if self.rule.unit in SAME_TASK else 0

    def plan(self, *, iteration: int, available: Availability, tasks: Sequence[str] = ()) -> BatchPlan:
        """The batch of 1-based `iteration`; once per iteration, in order.

        `tasks` are the hashes of the next `num_tasks` tasks. Remainders of all roundings are carried on, so that sums
        over iterations follow the declared shares; what the buffer lacks is not. Raises ReplayStarved under
        `shortfall: error`.
        """
        if len(tasks) != self.num_tasks:
            raise ValueError(f"tasks must be the next {self.num_tasks}, got {len(tasks)}.")
        configured = self.rule.fraction_at(iteration)
        self.started = self.started or self._starts(iteration, available)
        share = Fraction(configured) * Fraction(self.factor) if self.started else Fraction(0)
        plan = replace(compose(self.rule, share, available, tasks, self._remainders), fraction=configured)
        self.starved_iterations += plan.shortfall > 0
        if plan.shortfall and self.rule.shortfall == "error":
            raise ReplayStarved(plan.replay, plan.planned_replay, iteration)
        return plan

    def plan_replay_alone(self, iteration: int, available: Availability) -> BatchPlan | None:
        """A whole batch from the buffer, by the sources of the rule; None where it has less, or replay begins later.

        It takes nothing from what `plan` carries over: the shares of mixed batches stay exact.
        """
        if not self.started:
            return None
        plan = compose(self.rule, Fraction(1), available, (), Remainders())
        return None if plan.groups or plan.shortfall else replace(plan, fraction=self.rule.fraction_at(iteration))

    def restarts(self, groups: int, share: float) -> int:
        """How many of so many fresh groups are to begin inside stored successes; remainders are carried on."""
        return self._remainders.split("restarts", groups, [1 - Fraction(share), Fraction(share)])[1]

    def feed(self, *, success_rate: float | None, ess_by_age: Mapping[str, float]) -> None:
        """What an iteration showed: success of its fresh episodes (None: there were none), ESS of its replay."""
        wanted = self.rule.start.success_rate
        if wanted is not None and success_rate is not None and success_rate >= wanted:
            self.success_reached = True
        if self.rule.controller == "ess":
            self.factor = self.rule.ess.next_factor(self.factor, ess_by_age)

    def state(self) -> dict[str, Any]:
        """JSON-able and exact."""
        numbers = {name: getattr(self, name) for name in _STATE}
        return {"unit": self.rule.unit, **numbers, "remainders": self._remainders.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of another unit, whose remainders are of something else."""
        if state["unit"] != self.rule.unit:
            raise ValueError(
                f"replay.unit must be the one the state was saved by ({state['unit']}), got {self.rule.unit}. "
                f"Set replay.unit: {state['unit']}, or start a new run."
            )
        for name, kind in _STATE.items():
            setattr(self, name, kind(state[name]))
        self._remainders.load_state(state["remainders"])

    def _starts(self, iteration: int, available: Availability) -> bool:
        start = self.rule.start
        return (
            iteration >= start.iteration
            and progress_at(iteration, self.rule.iterations) >= start.progress
            and (start.success_rate is None or self.success_reached)
            and available.rows >= start.buffer
        )


def with_completions(
    picks: Sequence[Pick], flat: Sequence[tuple[str, float]], stored: Mapping[tuple[str, float], int]
) -> tuple[Pick, ...]:
    """`picks`, of as many rows, begun by one row for each group of equal rewards that the buffer can complete.

    `flat` has the task and the reward of each such group, `stored` the rows by task and reward. A row comes out of a
    pick of its own task, or of one of any task, the largest first: how much is replayed does not change.
    """
    left = list(picks)
    taken = Counter[str]()
    first: list[Pick] = []
    for task, reward in flat:
        others = sum(count for (of, got), count in stored.items() if of == task and got != reward)
        givers = [i for i, pick in enumerate(left) if pick.count and pick.task in (task, None)]
        if not givers or others <= taken[task]:
            continue
        giver = max(givers, key=lambda i: (left[i].task == task, left[i].count))
        taken[task] += 1
        first.append(replace(left[giver], count=1, task=task, reward_other_than=reward))
        left[giver] = replace(left[giver], count=left[giver].count - 1)
    return (*first, *(pick for pick in left if pick.count))


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
