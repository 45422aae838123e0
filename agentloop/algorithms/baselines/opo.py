"""On-Policy RL with Optimal reward baseline: a reward minus the length-weighted mean of its group."""

import math
from collections.abc import Sequence

from agentloop.algorithms.declarations import Algorithm, Member


def length_weighted_mean(members: Sequence[Member]) -> float:
    """Compute sum(L r) / sum(L), L in action tokens: it has the least variance if |grad log pi|^2 grows with L."""
    rewards = [member.reward for member in members]
    lengths = [member.num_action_tokens for member in members]
    if max(rewards) == min(rewards) or sum(lengths) == 0:
        return rewards[0]
    return math.fsum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)


OPO = Algorithm(
    name="opo",
    paper="Hao et al. 2025, arXiv 2505.23585",
    formula="r - sum(L r) / sum(L), L in action tokens",
    no_signal="a group of equal rewards",
    compares="group",
    baseline=length_weighted_mean,
    credits_turns=False,
)
