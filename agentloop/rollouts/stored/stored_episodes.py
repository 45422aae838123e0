"""Trajectories as their environment knows them: the task that was asked, and the whole conversation."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from agentloop.environments import RunEnvironments, Task
from agentloop.records import TurnRewards, TurnStates
from context.authors import DEMONSTRATION, LLM, AuthorTable
from context.messages import Message
from context.tokens.loss_mask import runs_of
from context.tokens.token_sequence import Segment, TokenSequence
from replay.errors import ContentGone, CorruptTrajectory
from replay.records import TaskRecord, Trajectory
from replay.storage.read import task_records
from replay.store import ReplayStore


@dataclass(frozen=True)
class StoredEpisode:
    """What is known of an episode once its environment's instance is gone."""

    task: Task
    """The task that was asked; its prompt is the opening messages."""
    messages: tuple[Message, ...]

    @property
    def turns(self) -> list[tuple[Message, ...]]:
        """Each reply with what followed it, behind the opening messages."""
        messages, after = self.messages, len(self.task.prompt)
        starts = [i for i, message in enumerate(messages) if i >= after and message.author == LLM]
        return [tuple(messages[start:end]) for start, end in pairwise([*starts, len(messages)])]


def sampled_replies(segments: Sequence[Segment], authors: AuthorTable) -> list[TokenSequence]:
    """The tokens of each reply in order: between any two stands something that was not sampled."""
    replies = []
    for tokens in (segment.tokens for segment in segments if segment.reason != "fork"):
        replies += [tokens.part(start, end) for start, end in runs_of(authors.has_behavior(tokens.authors))]
    return replies


@dataclass(frozen=True)
class StoredEpisodes:
    """Finds the episodes of trajectories, fresh or stored."""

    environments: RunEnvironments
    store: ReplayStore

    def of(self, rows: Sequence[Trajectory]) -> list[StoredEpisode | None]:
        """None for a row of another environment or version, and for one whose messages can't be read."""
        with self.store.reading() as connection:
            tasks = task_records(connection, [row.record.task for row in rows])
        return [self._of_one(row, tasks) for row in rows]

    def _of_one(self, row: Trajectory, tasks: Mapping[str, TaskRecord]) -> StoredEpisode | None:
        record = row.record
        factory = self.environments.recorded(record.environment, record.environment_version)
        messages = row.messages
        if not messages and factory is not None:  # a draw leaves them where they are
            with suppress(CorruptTrajectory, ContentGone):
                messages = self.store.read([row.id])[0].messages
        replies = [i for i, message in enumerate(messages) if message.author in (LLM, DEMONSTRATION)]
        if factory is None or record.task not in tasks or not 0 < record.num_turns <= len(replies):
            return None
        task = Task(messages[: replies[-record.num_turns]], tasks[record.task].payload)
        return StoredEpisode(factory.labelled(task), messages)


def stored_turn_rewards(episodes: StoredEpisodes) -> TurnRewards:
    """Turn rewards of trajectories, asked of their environment again; None where their messages are unknown."""

    def of_one(row: Trajectory, episode: StoredEpisode | None) -> tuple[float, ...] | None:
        if episode is None:
            return None
        factory = episodes.environments.of(episode.task)
        return factory.turn_rewards(episode.task, episode.messages, replies=row.record.num_turns)

    return lambda rows: list(map(of_one, rows, episodes.of(rows)))


def stored_turn_states(episodes: StoredEpisodes) -> TurnStates:
    """States of trajectories, read off their messages; None where these are unknown."""

    def of_one(row: Trajectory, episode: StoredEpisode | None) -> tuple[str, ...] | None:
        if episode is None:
            return None
        factory = episodes.environments.of(episode.task)
        return factory.turn_states(episode.task, episode.messages, task_hash=row.record.task)

    return lambda rows: list(map(of_one, rows, episodes.of(rows)))
