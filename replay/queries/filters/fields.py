"""What a filter can ask about a trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import sqlalchemy as sa

from replay.records import STATES
from replay.storage.format.schema import groups, policies, trajectories

_rows = trajectories.c


class Kind(Enum):
    """What a field is compared with."""

    number = "a number"
    whole = "a whole number"
    truth = "true or false"
    text = "a text in quotes"
    messages = "a text in quotes, searched in the messages"
    calls = "the name of a called tool in quotes"


@dataclass(frozen=True)
class Field:
    name: str
    kind: Kind
    meaning: str
    expression: Callable[[], sa.ColumnElement[Any]] | None = None
    """Over the table `trajectories`."""
    of_group: sa.Column[Any] | None = None
    """A column of the row's group. With neither it asks the messages, see `condition`."""
    may_be_unknown: bool = False
    choices: tuple[str, ...] = ()

    @property
    def asks_messages(self) -> bool:
        return self.kind in (Kind.messages, Kind.calls)


def staleness() -> sa.ColumnElement[int]:
    """Of the row today: publishes of its run since its oldest token; NULL where the run has published nothing."""
    newest = sa.select(sa.func.max(policies.c.version)).where(policies.c.run == _rows.run)
    return newest.correlate(trajectories).scalar_subquery() - _rows.policy_version_min


def _is(column: sa.Column[Any]) -> Callable[[], sa.ColumnElement[Any]]:
    return lambda: column


_ALL = (
    Field("reward", Kind.number, "reward of the episode", _is(_rows.reward)),
    Field("success", Kind.truth, "whether it reached `rollout.success_reward`", _is(_rows.success)),
    Field("advantage", Kind.number, "advantage within the group it was born in", _is(_rows.advantage)),
    Field(
        "staleness",
        Kind.whole,
        "publishes of its run since its oldest token was sampled",
        staleness,
        may_be_unknown=True,
    ),
    Field("uses", Kind.whole, "updates that replayed it", _is(_rows.uses)),
    Field("turns", Kind.whole, "replies of the policy", _is(_rows.num_turns)),
    Field("tools", Kind.whole, "tool calls", _is(_rows.num_tool_calls)),
    Field("tokens", Kind.whole, "tokens of all its segments", _is(_rows.num_tokens)),
    Field("action_tokens", Kind.whole, "sampled tokens among them", _is(_rows.num_action_tokens)),
    Field("bytes", Kind.whole, "bytes it takes in the database", _is(_rows.num_bytes), may_be_unknown=True),
    Field(
        "entropy",
        Kind.number,
        "mean entropy per sampled token when sampled, in nats",
        _is(_rows.mean_entropy),
        may_be_unknown=True,
    ),
    Field(
        "log_prob",
        Kind.number,
        "mean behavior log-prob per sampled token, in nats",
        _is(_rows.mean_behavior_log_prob),
        may_be_unknown=True,
    ),
    Field("iteration", Kind.whole, "the iteration that collected it", _is(_rows.iteration)),
    Field("slot", Kind.whole, "its place within that iteration", _is(_rows.slot)),
    Field("member", Kind.whole, "its place within its group", _is(_rows.member)),
    Field("policy_version", Kind.whole, "publishes before its oldest sampled token", _is(_rows.policy_version_min)),
    Field("temperature", Kind.number, "sampling temperature", _is(_rows.temperature)),
    Field("group_size", Kind.whole, "members of its group at birth", of_group=groups.c.size),
    Field("group_success", Kind.number, "share of successful members of its group", of_group=groups.c.success_rate),
    Field("group_reward", Kind.number, "mean reward of its group", of_group=groups.c.reward_mean),
    Field("id", Kind.text, "its id", _is(_rows.id)),
    Field("run", Kind.text, "id of its run", _is(_rows.run)),
    Field("task", Kind.text, "hash of its task", _is(_rows.task)),
    Field("group", Kind.text, "id of its group", _is(_rows.group)),
    Field("source", Kind.text, "where it came from: self, teacher, import, ...", _is(_rows.source)),
    Field("environment", Kind.text, "name of its environment", _is(_rows.environment)),
    Field("environment_version", Kind.text, "the version of its environment", _is(_rows.environment_version)),
    Field("state", Kind.text, "whether it may be drawn", _is(_rows.state), choices=STATES),
    Field("state_reason", Kind.text, "why it has that state", _is(_rows.state_reason), may_be_unknown=True),
    Field("stop_reason", Kind.text, "what ended the episode", _is(_rows.stop_reason)),
    Field("error", Kind.text, "kind of the error that ended it", _is(_rows.error_kind), may_be_unknown=True),
    Field("tool", Kind.calls, "a tool it called"),
    Field("text", Kind.messages, "what a message of it says, its reasoning included"),
)
FIELDS: dict[str, Field] = {field.name: field for field in _ALL}
