"""What trajectories are worth to the update: rewards, penalties and advantages as a run is configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, Task
from agentloop.records import Charge, Penalty
from agentloop.rollouts.advantage_estimator import Estimator, TurnRewards
from agentloop.rollouts.rewards import RewardScorer
from context.authors import DEMONSTRATION, LLM
from context.messages import Message
from replay.errors import CorruptTrajectory
from replay.records import TaskRecord, Trajectory
from replay.storage.read import task_records
from replay.store import ReplayStore


@dataclass(frozen=True)
class Valuation:
    scorer: RewardScorer
    estimator: Estimator
    penalty: Penalty | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Valuation:
        """Without a reward model, a KL penalty and turns: what needs neither weights nor a buffer."""
        return cls(RewardScorer(config.reward, max_tokens=config.context.max_tokens), Estimator(config))

    def charges(self, rows: Sequence[Trajectory]) -> list[Charge]:
        """What each pays for its distance from the reference; nothing without a penalty."""
        if self.penalty is None or not rows:
            return [Charge()] * len(rows)
        return self.penalty(rows)

    def worth(self, rows: Sequence[Trajectory]) -> list[float]:
        """The reward of each less its penalty."""
        return net(rows, self.charges(rows))


def net(rows: Sequence[Trajectory], charges: Sequence[Charge]) -> list[float]:
    """Rewards less penalties."""
    return [row.record.reward - charge.penalty for row, charge in zip(rows, charges, strict=True)]


def asked_again(factory: EnvironmentFactory, store: ReplayStore) -> TurnRewards:
    """Turn rewards of stored trajectories, of their messages and their tasks' payloads.

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
