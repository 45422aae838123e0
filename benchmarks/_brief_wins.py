"""Another reward for fetch and place: a success that took more replies than needed counts half."""

from collections.abc import Mapping
from typing import Any

from agentloop.rollouts.episodes.episode import Episode

NEEDED = 5
"""Go, take, go, put, answer."""


def brief(episode: Episode) -> float:
    return _brief(episode.environment_reward, episode.num_turns)


def brief_row(row: Mapping[str, Any]) -> float:
    return _brief(row["reward"], row["num_turns"])


def _brief(score: float, replies: int) -> float:
    return score if replies <= NEEDED else score / 2
