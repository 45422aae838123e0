"""Advantages of whole trajectories."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

_STD_EPSILON = 1e-6


def grpo_advantages(rewards: Sequence[float], *, normalise_std: bool) -> list[float]:
    """Group-relative advantages of one group, one per trajectory (GRPO, Shao et al. 2024, arXiv 2402.03300).

    (r - mean) / (std + 1e-6) with the sample standard deviation (n - 1), which is what published GRPO results
    were trained with; without `normalise_std` only r - mean (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783). A
    group of one and a group of equal rewards tell nothing and get exactly 0: rounding in the mean must not
    become a signal.

    Does not weigh trajectories by length or by number of segments. Raises ValueError for a reward that is not
    finite.
    """
    for member, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{member}] must be finite, got {reward}. Check the environment's reward.")
    if not rewards or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalise_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + _STD_EPSILON) for c in centred]


def returns(advantages: Tensor, values: Tensor) -> Tensor:
    """What a critic regresses on: advantages + values; reward units."""
    return advantages + values
