"""ReMax: a reward minus that of one greedy episode on the same task."""

import math

from agentloop.algorithms.declarations import Algorithm, Member


def reward_over_greedy(member: Member) -> float:
    return 0.0 if math.isnan(member.greedy_reward) else member.reward - member.greedy_reward


REMAX = Algorithm(
    name="remax",
    paper="Li et al. 2023, arXiv 2310.10505",
    formula="r - r(greedy)",
    no_signal="a reward as high as the greedy one's",
    remark="one greedy episode per task, which is not stored; where it fails, 0",
    compares="nothing",
    advantage_of=reward_over_greedy,
    credits_turns=False,
    several_agents=False,
    greedy_episodes=True,
)
