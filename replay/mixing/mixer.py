"""What a batch is made of: one explicit, deterministic function of the rule, the tasks at hand and the buffer's stock.

Nothing here is random and nothing is read: the same calls in the same order give the same batches, on any machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from replay.errors import ReplayError
from replay.mixing.apportion import Remainders
from replay.mixing.batch_plan import BatchPlan, compose
from replay.mixing.mix_settings import SAME_TASK, MixRule, progress_at
from replay.mixing.request import Availability, Pick

_STATE = {"started": bool, "success_reached": bool, "factor": float, "starved_iterations": int}
"""What a mixer's state holds beside the unit and the remainders."""


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
