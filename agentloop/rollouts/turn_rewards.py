"""Turn rewards of stored trajectories: their environment is asked again, with their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentloop.environments import EnvironmentFactory, Task
from agentloop.records import TurnRewards
from context.authors import DEMONSTRATION, LLM
from context.messages import Message
from replay.errors import CorruptTrajectory
from replay.records import TaskRecord, Trajectory
from replay.storage.read import task_records
from replay.store import ReplayStore


def stored_turn_rewards(factory: EnvironmentFactory, store: ReplayStore) -> TurnRewards:
    """Turn rewards of trajectories, fresh or stored, from their messages and their tasks' payloads.

    Those of a row of another environment, or of another version of this one, are unknown; so are those of one whose
    messages can't be read, which is quarantined.
    """

    def of_one(row: Trajectory, tasks: Mapping[str, TaskRecord]) -> tuple[float, ...] | None:
        record = row.record
        same = (record.environment, record.environment_version) == (factory.name, factory.version)
        messages = row.messages or (_stored_messages(store, row.id) if same else ())
        replies = [i for i, message in enumerate(messages) if message.author in (LLM, DEMONSTRATION)]
        if not same or record.task not in tasks or not 0 < record.num_turns <= len(replies):
            return None
        task = Task(messages[: replies[-record.num_turns]], tasks[record.task].payload)
        return factory.turn_rewards(task, messages, replies=record.num_turns)

    def turn_rewards(rows: Sequence[Trajectory]) -> list[tuple[float, ...] | None]:
        with store.reading() as connection:
            tasks = task_records(connection, [row.record.task for row in rows])
        return [of_one(row, tasks) for row in rows]

    return turn_rewards


def _stored_messages(store: ReplayStore, id: str) -> tuple[Message, ...]:
    """A draw leaves them where they are."""
    try:
        return store.read([id])[0].messages
    except CorruptTrajectory:
        return ()
