"""Records and functions that acting and learning share, so that neither imports the other."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from replay.records import Trajectory

TurnRewards = Callable[[Sequence[Trajectory]], Sequence[tuple[float, ...] | None]]
"""Gives the reward that each reply of each trajectory earned by itself; None where the turns are unknown."""


@dataclass(frozen=True)
class KlPenalty:
    """The penalty of one trajectory for its distance from the reference policy."""

    amount: float = 0.0
    """Reward units that are subtracted from the trajectory's reward."""
    kl: float = 0.0
    """The distance in nats, summed over `tokens`."""
    tokens: int = 0
    """Action tokens whose behavior log-prob is known."""


Penalty = Callable[[Sequence[Trajectory]], Sequence[KlPenalty]]
"""Gives the current penalty of each trajectory, fresh or stored."""


def kl_penalties(penalty: Penalty | None, trajectories: Sequence[Trajectory]) -> Sequence[KlPenalty]:
    """Compute the penalty of each trajectory; it is zero if the run has no KL in its rewards."""
    if penalty is None or not trajectories:
        return [KlPenalty()] * len(trajectories)
    return penalty(trajectories)


def penalised_rewards(trajectories: Sequence[Trajectory], penalties: Sequence[KlPenalty]) -> list[float]:
    """Subtract each trajectory's penalty from its stored reward."""
    return [row.record.reward - penalty.amount for row, penalty in zip(trajectories, penalties, strict=True)]


def kl_metrics(penalties: Iterable[KlPenalty]) -> dict[str, float]:
    """Compute `actor/reward_kl`: the nats per action token behind the penalties of fresh rewards; empty without any."""
    found = list(penalties)
    tokens = sum(penalty.tokens for penalty in found)
    return {"actor/reward_kl": sum(penalty.kl for penalty in found) / tokens} if tokens else {}


@dataclass(frozen=True)
class Completion:
    """One reply as an engine sampled it."""

    token_ids: tuple[int, ...]
    """The tokens in the order of sampling, with the stop token if one was sampled."""
    log_probs: tuple[float, ...]
    """Nats, one per token, over the whole vocabulary at the sampling temperature (at 1 when greedy)."""
    policy_version: int | tuple[int, ...]
    """Publishes before the tokens were sampled: one number for all tokens, or one per token."""
    entropies: tuple[float, ...] | None = None
    """Entropy in nats of the distribution behind each token; None where the engine does not report it."""


class GenerationFailed(Exception):
    """The engine gave no usable reply; the text says why. The episode ends, and nothing of the reply is stored."""
