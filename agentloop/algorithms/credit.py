"""Credit per turn: a reply is valued by what it earned itself and by what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from agentloop.algorithms.advantages import STD_EPSILON, Member


def relative_turn_rewards(
    member: Member, compared: Sequence[Member], *, centre: bool, normalise_std: bool
) -> tuple[float, ...]:
    """z_k = (r_k - mean) / (std + 1e-6) of each turn of `member`, over the turns of all `compared`; without
    `centre` r_k, without `normalise_std` the scale is 1.

    A trajectory weighs the same however many turns it has: mean = mean_i(mean_k r_ik) and
    std^2 = sum_i(mean_k (r_ik - mean)^2) / (n - 1), over the n of `compared` whose turn rewards are known. With one
    turn each these are GRPO's. All equal: exactly 0 where `member` is among them. Compared with nobody, or with
    itself alone: 0.

    Process supervision with GRPO (Shao et al. 2024, arXiv 2402.03300, 4.1.3), which weighs every step the same.
    """
    own = member.turn_rewards
    if not own:
        return ()
    if not centre:
        return own
    known = [other.turn_rewards for other in compared if other.turn_rewards]
    if not any(other is not member and other.turn_rewards for other in compared):
        return (0.0,) * len(own)
    flat = [reward for rewards in known for reward in rewards]
    if max(flat) == min(flat):
        return tuple(reward - flat[0] for reward in own)
    mean = math.fsum(math.fsum(rewards) / len(rewards) for rewards in known) / len(known)
    scale = 1.0
    if normalise_std and len(known) > 1:
        spread = math.fsum(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards) for rewards in known)
        scale = math.sqrt(spread / (len(known) - 1)) + STD_EPSILON
    return tuple((reward - mean) / scale for reward in own)


def turn_advantages(outcome: float, turn_terms: Sequence[float], *, gamma: float, coef: float) -> list[float]:
    """A_k = gamma^(K-1-k) outcome + coef sum_{j>=k} gamma^(j-k) z_j: a reply answers for what follows it.

    `outcome` is the advantage of the whole trajectory, as if it came with the last reply. With gamma 1 and terms of 0
    every turn has exactly `outcome`.
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
    """The turns' advantages on the action tokens of a trajectory's segments; 0 elsewhere.

    A reply is a maximal run of action tokens in a segment of the conversation itself (`is_main`); the last runs are
    the turns, and what was spoken before the first turn has the first one's advantage. Segments beside the
    conversation (a strategy's question) have `outcome`. None if there are fewer runs than turns: which is which is
    then unknown.
    """
    runs = [
        (index, start, end)
        for index, (mask, main) in enumerate(zip(action, is_main, strict=True))
        if main
        for start, end in _runs(mask)
    ]
    if not turns or len(runs) < len(turns):
        return None
    arrays = tuple(np.where(mask & (not main), outcome, 0.0) for mask, main in zip(action, is_main, strict=True))
    turns_before = len(runs) - len(turns)
    for number, (index, start, end) in enumerate(runs):
        arrays[index][start:end] = turns[max(0, number - turns_before)]
    return tuple(array.astype(np.float32) for array in arrays)


def _runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, end) of the maximal runs of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in pairwise(edges)][::2]
