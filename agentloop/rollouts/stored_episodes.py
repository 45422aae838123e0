"""Rebuilds from stored trajectories what an environment's methods take: the task and the whole conversation."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from agentloop.environments import RunEnvironments, Task
from context.authors import DEMONSTRATION, LLM, AuthorTable
from context.messages import Message
from context.tokens.loss_mask import runs_of
from context.tokens.token_sequence import Segment, TokenSequence
from replay.errors import ContentGone, CorruptTrajectory
from replay.records import REMOVED_TASK, TaskRecord, Trajectory
from replay.storage.read import task_records
from replay.store import ReplayStore


@dataclass(frozen=True)
class StoredEpisode:
    """A past episode without its environment's instance."""

    task: Task
    """The task of the episode; its prompt is the opening messages."""
    messages: tuple[Message, ...]

    @property
    def turns(self) -> list[tuple[Message, ...]]:
        """Each reply after the opening messages, with the messages that followed it."""
        messages, after = self.messages, len(self.task.prompt)
        starts = [i for i, message in enumerate(messages) if i >= after and message.author == LLM]
        return [tuple(messages[start:end]) for start, end in pairwise([*starts, len(messages)])]


def sampled_replies(segments: Sequence[Segment], authors: AuthorTable) -> list[TokenSequence]:
    """Return the tokens of each reply in order; tokens that were not sampled separate the replies."""
    replies = []
    for tokens in (segment.tokens for segment in segments if segment.reason != "fork"):
        replies += [tokens.part(start, end) for start, end in runs_of(authors.has_behavior(tokens.authors))]
    return replies


@dataclass(frozen=True)
class StoredEpisodes:
    """Finds the episodes of trajectories, fresh or stored."""

    environments: RunEnvironments
    store: ReplayStore

    def find(self, rows: Sequence[Trajectory]) -> list[StoredEpisode | None]:
        """Find each row's episode; None for another environment or version, and where messages can't be read."""
        with self.store.reading() as connection:
            tasks = task_records(connection, [row.record.task for row in rows])
        return [self._find_one(row, tasks) for row in rows]

    def turn_rewards(self, rows: Sequence[Trajectory]) -> list[tuple[float, ...] | None]:
        """Compute the turn rewards of rows by their environment; None where they or the messages are unknown."""
        return [self._turn_rewards(row, episode) for row, episode in zip(rows, self.find(rows), strict=True)]

    def _find_one(self, row: Trajectory, tasks: Mapping[str, TaskRecord]) -> StoredEpisode | None:
        record = row.record
        factory = self.environments.recorded(record.environment, record.environment_version)
        messages = row.messages
        if not messages and factory is not None:  # a draw leaves them where they are
            with suppress(CorruptTrajectory, ContentGone):
                messages = self.store.read([row.id])[0].messages
        replies = [i for i, message in enumerate(messages) if message.author in (LLM, DEMONSTRATION)]
        stored = tasks.get(record.task)
        was_forgotten = stored is None or stored.payload == json.loads(REMOVED_TASK)
        if factory is None or stored is None or was_forgotten or not 0 < record.num_turns <= len(replies):
            return None
        task = Task(messages[: replies[-record.num_turns]], stored.payload)
        return StoredEpisode(factory.labelled(task), messages)

    def _turn_rewards(self, row: Trajectory, episode: StoredEpisode | None) -> tuple[float, ...] | None:
        if episode is None:
            return None
        factory, replies = self.environments.factory_for(episode.task), row.record.num_turns
        rewards = factory.turn_rewards(episode.task, episode.messages, replies=replies)
        if rewards is None and row.record.source == "self" and not factory.defines("turn_rewards"):
            return (0.0,) * replies  # its observations could have rewarded a reply, and rewarded none
        return rewards
