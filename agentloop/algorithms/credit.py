"""Credit per turn: the advantage of a reply depends on its own reward and on what followed it."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from agentloop.algorithms.advantages import STD_EPSILON
from agentloop.algorithms.declarations import Member


def relative_turn_rewards(
    member: Member, compared: Sequence[Member], *, centre: bool, normalise_std: bool
) -> tuple[float, ...]:
    """Compare each turn's reward of `member` with the turns of others: z_k = (r_k - mean) / (std + 1e-6).

    Without `centre` z_k is r_k; without `normalise_std` nothing is divided. The mean is over the turns of all
    `compared`, the std over these and the member's own. A trajectory has the same weight however many turns it has:
    mean = mean_i(mean_k r_ik), and std^2 = sum_i(mean_k (r_ik - m)^2) / (n - 1) with m the mean of these n
    trajectories. Trajectories with unknown turn rewards are left out. With one turn each, z is GRPO's advantage; with K
    turns it is at most sqrt(K (n - 1) + 1). It is exactly 0 for turns that equal all others or have no others.

    GRPO's process supervision (Shao et al. 2024, arXiv 2402.03300, 4.1.3) gives each step the same weight instead.
    """
    own = member.turn_rewards
    if not own:
        return ()
    if not centre:
        return own
    known = [other.turn_rewards for other in compared if other.turn_rewards]
    if not any(other is not member and other.turn_rewards for other in compared):
        return (0.0,) * len(own)
    everyone = known if any(other is member for other in compared) else [*known, own]
    mean = _mean_of_means(known)
    scale = _deviation(everyone) + STD_EPSILON if normalise_std else 1.0
    return tuple((reward - mean) / scale for reward in own)


def _mean_of_means(trajectories: Sequence[Sequence[float]]) -> float:
    """Average the trajectories' means. The mean of equal rewards is exactly their value: rounding is no signal."""
    flat = [reward for rewards in trajectories for reward in rewards]
    if max(flat) == min(flat):
        return flat[0]
    return math.fsum(math.fsum(rewards) / len(rewards) for rewards in trajectories) / len(trajectories)


def _deviation(trajectories: Sequence[Sequence[float]]) -> float:
    mean = _mean_of_means(trajectories)
    squares = math.fsum(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards) for rewards in trajectories)
    return math.sqrt(squares / (len(trajectories) - 1))


def turn_advantages(outcome: float, turn_terms: Sequence[float], *, gamma: float, coef: float) -> list[float]:
    """Compute A_k = gamma^(K-1-k) outcome + coef sum_{j>=k} gamma^(j-k) z_j; z are the `turn_terms`.

    `outcome`, the advantage of the whole trajectory, counts as if it came with the last reply. With gamma 1 and terms
    of 0 every turn has exactly `outcome`.
    """
    result: list[float] = []
    following = outcome
    for position, term in enumerate(reversed(turn_terms)):
        following = coef * term + (gamma * following if position else outcome)
        result.append(following)
    return result[::-1]


def over_tokens(
    action: Sequence[npt.NDArray[np.bool_]], is_main: Sequence[bool], turns: Sequence[float], *, outcome: float
) -> tuple[npt.NDArray[np.float32], ...] | None:
    """Give the action tokens of a trajectory's segments the advantage of their turn; other tokens have 0.

    A reply is a maximal run of action tokens in a segment of the conversation itself (`is_main`). The last replies are
    the turns; earlier replies have the first turn's advantage. Other segments, such as a strategy's question, have
    `outcome`. Returns None if there are fewer replies than turns, because they can't be matched.
    """
    main_masks = [(index, mask) for index, mask in enumerate(action) if is_main[index]]
    runs = [(index, start, end) for index, mask in main_masks for start, end in _runs(mask)]
    if not turns or len(runs) < len(turns):
        return None
    arrays = tuple(np.where(mask & (not main), outcome, 0.0) for mask, main in zip(action, is_main, strict=True))
    turns_before = len(runs) - len(turns)
    for number, (index, start, end) in enumerate(runs):
        arrays[index][start:end] = turns[max(0, number - turns_before)]
    return tuple(array.astype(np.float32) for array in arrays)


def _runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Find the maximal runs of True, each as [start, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in pairwise(edges)][::2]
