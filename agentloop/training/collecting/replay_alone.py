"""A batch of replayed rows alone, for a learner that would wait otherwise."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from replay.mixing.apportion import Remainders
from replay.mixing.batch_plan import BatchPlan, compose
from replay.mixing.mixer import Mixer
from replay.mixing.request import Availability


def replay_alone(mixer: Mixer, iteration: int, available: Availability) -> BatchPlan | None:
    """A whole batch from the buffer, by the sources of the rule; None where the buffer has less, or replay is to begin
    later.

    It takes nothing from what the mixed batches carry over: their shares stay exact.
    """
    if not mixer.started:
        return None
    plan = compose(mixer.rule, Fraction(1), available, (), Remainders())
    return None if plan.groups or plan.shortfall else replace(plan, fraction=mixer.rule.fraction_at(iteration))
