"""Proximal Policy Optimization: GAE makes advantages of tokens from a critic's values (`algorithms/gae.py`)."""

from agentloop.algorithms.declarations import Algorithm

PPO = Algorithm(
    name="ppo",
    paper="Schulman et al. 2017, arXiv 1707.06347",
    formula="of each token by GAE, from a [critic](#critic)",
    no_signal="returns that the critic foresaw",
    remark="rows are stored with the advantage of `grpo`, which samplers alone look at",
    compares="critic",
    stored_as="grpo",
    credits_turns=False,
    several_agents=False,
)
