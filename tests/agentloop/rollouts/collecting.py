"""Collecting as a run does it, with a scripted engine and without a buffer."""

from collections.abc import Sequence

from agentloop.config import RunConfig
from agentloop.environments import Task
from agentloop.records import Penalty
from agentloop.rollouts.actors import Actors
from agentloop.rollouts.collect import Collector
from agentloop.rollouts.rewards import RewardScorer
from agentloop.rollouts.trajectories import Collected, CollectedBy
from agentloop.training.advantage_estimator import AdvantageEstimator


def collect(
    actors: Actors,
    groups: Sequence[tuple[Task, int]],
    config: RunConfig,
    *,
    run: str = "run",
    iteration: int = 1,
    penalty: Penalty | None = None,
) -> Collected:
    scorer = RewardScorer(config.reward)
    collector = Collector(actors, config, scorer, AdvantageEstimator(config).advantages_for_groups, penalty)
    return collector.collect(groups, CollectedBy(run, iteration, 0))
