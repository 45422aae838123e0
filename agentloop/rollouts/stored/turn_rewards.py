"""Turn rewards of stored trajectories: their environment is asked again, with their messages."""

from __future__ import annotations

from collections.abc import Sequence

from agentloop.records import TurnRewards
from agentloop.rollouts.stored.stored_episodes import StoredEpisodes
from replay.records import Trajectory


def stored_turn_rewards(episodes: StoredEpisodes) -> TurnRewards:
    """Turn rewards of trajectories, from their messages and their tasks' payloads; None where these are unknown."""

    def turn_rewards(rows: Sequence[Trajectory]) -> list[tuple[float, ...] | None]:
        return [
            None
            if episode is None
            else episodes.environments.turn_rewards(episode.task, episode.messages, replies=row.record.num_turns)
            for row, episode in zip(rows, episodes.of(rows), strict=True)
        ]

    return turn_rewards
