"""What acting and learning share, so that neither needs to know the other."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from replay.records import Trajectory

TurnRewards = Callable[[Sequence[Trajectory]], Sequence[tuple[float, ...] | None]]
"""What each reply of some trajectories earned by itself; None for one whose turns are unknown."""
TurnStates = Callable[[Sequence[Trajectory]], Sequence[tuple[str, ...] | None]]
"""Hashes of the states in which some trajectories gave each reply; None for one whose turns are unknown."""


@dataclass(frozen=True)
class KlPenalty:
    """What one trajectory pays for its distance from the reference policy."""

    amount: float = 0.0
    """What is taken off its reward; reward units."""
    kl: float = 0.0
    """What it pays for: nats, summed over `tokens`."""
    tokens: int = 0
    """Action tokens whose behavior log-prob is known."""


Penalty = Callable[[Sequence[Trajectory]], Sequence[KlPenalty]]
"""Today's penalty of each of some trajectories, fresh or stored."""


def kl_penalties(penalty: Penalty | None, trajectories: Sequence[Trajectory]) -> Sequence[KlPenalty]:
    """The penalty of each trajectory: nothing for any where the run has no KL in its rewards."""
    if penalty is None or not trajectories:
        return [KlPenalty()] * len(trajectories)
    return penalty(trajectories)


def penalised_rewards(trajectories: Sequence[Trajectory], penalties: Sequence[KlPenalty]) -> list[float]:
    """The stored reward of each trajectory less its penalty."""
    return [row.record.reward - penalty.amount for row, penalty in zip(trajectories, penalties, strict=True)]


def kl_metrics(penalties: Iterable[KlPenalty]) -> dict[str, float]:
    """`actor/reward_kl`: nats per action token that fresh rewards were charged for; nothing where no token was."""
    found = list(penalties)
    tokens = sum(penalty.tokens for penalty in found)
    return {"actor/reward_kl": sum(penalty.kl for penalty in found) / tokens} if tokens else {}


@dataclass(frozen=True)
class Completion:
    token_ids: tuple[int, ...]
    """As sampled, the stop token included when one was sampled."""
    log_probs: tuple[float, ...]
    """Nats, one per token, over the whole vocabulary at the sampling temperature (at 1 when greedy)."""
    policy_version: int | tuple[int, ...]
    """Publishes before the tokens were sampled: of all of them, or one number per token."""
    entropies: tuple[float, ...] | None = None
    """Nats, of the distribution each token was sampled from; None where the engine does not say."""


class GenerationFailed(Exception):
    """There is no usable reply, and why, in words. The episode ends; nothing of the reply is kept."""
