"""Group Relative Policy Optimization: a reward minus its group's mean, divided by the group's deviation."""

from collections.abc import Sequence
from dataclasses import replace

from agentloop.algorithms.advantages import advantages_for_members, mean_reward
from agentloop.algorithms.declarations import Algorithm, Member

GRPO = Algorithm(
    name="grpo",
    paper="Shao et al. 2024, arXiv 2402.03300",
    formula="(r - mean) / (std + 1e-6), std with n - 1",
    no_signal="a group of equal rewards",
    remark="`dr_grpo` leaves the division out",
    compares="group",
    baseline=mean_reward,
    divides=True,
)


def group_advantages(rewards: Sequence[float], normalise_std: bool) -> list[float]:
    """Compute the advantages of one group from its rewards; without `normalise_std` they are Dr. GRPO's."""
    members = [Member(reward) for reward in rewards]
    return advantages_for_members(members, "stored", replace(GRPO, divides=normalise_std))
