"""The fields of trajectories that a filter can compare."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.functions import coalesce

from context.tokens.session_nodes import Fork, Status
from replay.records import STATES
from replay.storage.format.schema import groups, nodes, trajectories, trajectory_labels
from replay.storage.format.views import DRIFT, NUM_TOOL_ERRORS, STALENESS, TOKEN_GAP_MAX

_rows = trajectories.c


class FieldKind(Enum):
    """The kind of value that a field is compared with."""

    number = "a number"
    whole = "a whole number"
    truth = "True or False"
    text = "a text in quotes"
    word = "a word in quotes"
    messages = "a text in quotes, searched in the messages"
    calls = "the name of a called tool in quotes"
    requests = "a text in quotes, of a request"
    labels = "a label in quotes"
    notes = "a text in quotes, searched in the notes"
    payload = "a number, a text in quotes, True or False"


@dataclass(frozen=True)
class Field:
    name: str
    kind: FieldKind
    meaning: str
    expression: sa.ColumnElement[Any] | None = None
    """An expression over the table `trajectories`."""
    elsewhere: sa.Column[Any] | None = None
    """A column of the row's group, its labels or its session's requests. A field with neither is about messages: see
    `expression_to_sql.compare_field`."""
    choices: tuple[str, ...] = ()

    @property
    def may_be_unknown(self) -> bool:
        return bool(getattr(self.expression, "nullable", not isinstance(self.expression, coalesce)))


_ALL = (
    Field("reward", FieldKind.number, "reward of the episode", _rows.reward),
    Field("success", FieldKind.truth, "whether it reached `rollout.success_reward`", _rows.success),
    Field("advantage", FieldKind.number, "advantage within its group", _rows.advantage),
    Field(
        "staleness",
        FieldKind.whole,
        "publishes of its own run since its oldest token was sampled; imported rows have none",
        STALENESS,
    ),
    Field("uses", FieldKind.whole, "updates that replayed it", _rows.uses),
    Field("drift", FieldKind.number, "mean drift of its tokens in the update that used it last", DRIFT),
    Field(
        "token_gap_max",
        FieldKind.number,
        "largest absolute difference of a token's old and behavior log-prob in that update, in nats",
        TOKEN_GAP_MAX,
    ),
    Field("num_turns", FieldKind.whole, "replies of the policy", _rows.num_turns),
    Field("num_user_turns", FieldKind.whole, "messages of a user after the first reply", _rows.num_user_turns),
    Field("num_tool_calls", FieldKind.whole, "tool calls", _rows.num_tool_calls),
    Field("num_tool_errors", FieldKind.whole, "failed tool calls, the policy's mistakes included", NUM_TOOL_ERRORS),
    Field("num_tokens", FieldKind.whole, "tokens of all its segments", _rows.num_tokens),
    Field("num_action_tokens", FieldKind.whole, "sampled tokens of all its segments", _rows.num_action_tokens),
    Field("num_bytes", FieldKind.whole, "bytes it takes in the database", _rows.num_bytes),
    Field("mean_entropy", FieldKind.number, "mean entropy per sampled token when sampled, in nats", _rows.mean_entropy),
    Field(
        "mean_behavior_log_prob",
        FieldKind.number,
        "mean behavior log-prob per sampled token, in nats",
        _rows.mean_behavior_log_prob,
    ),
    Field("iteration", FieldKind.whole, "the iteration that collected it", _rows.iteration),
    Field("slot", FieldKind.whole, "its place within that iteration", _rows.slot),
    Field("member", FieldKind.whole, "its place within its group", _rows.member),
    Field("policy_version_min", FieldKind.whole, "publishes before its oldest sampled token", _rows.policy_version_min),
    Field("temperature", FieldKind.number, "sampling temperature", _rows.temperature),
    Field("group_size", FieldKind.whole, "members of its group", elsewhere=groups.c.size),
    Field(
        "group_success", FieldKind.number, "share of successful members of its group", elsewhere=groups.c.success_rate
    ),
    Field("group_reward", FieldKind.number, "mean reward of its group", elsewhere=groups.c.reward_mean),
    Field("id", FieldKind.text, "its id", _rows.id),
    Field("run", FieldKind.text, "id of its run", _rows.run),
    Field("task", FieldKind.text, "hash of its task", _rows.task),
    Field("group_id", FieldKind.text, "id of its group", _rows.group),
    Field("source", FieldKind.text, "where it came from: self, hindsight, teacher, import, ...", _rows.source),
    Field("environment", FieldKind.text, "name of its environment", _rows.environment),
    Field("environment_version", FieldKind.text, "the version of its environment", _rows.environment_version),
    Field("state", FieldKind.text, "whether it may be drawn", _rows.state, choices=STATES),
    Field("state_reason", FieldKind.text, "why it has that state", _rows.state_reason),
    Field("stop_reason", FieldKind.text, "what ended the episode", _rows.stop_reason),
    Field("error_kind", FieldKind.word, "kind of error of one of its tool calls", _rows.error_kinds),
    Field("tool", FieldKind.calls, "a tool it called"),
    Field("agent", FieldKind.requests, "an agent that sent a request in its session", elsewhere=nodes.c.agent),
    Field(
        "fork",
        FieldKind.requests,
        "why a request of its session starts a branch",
        elsewhere=nodes.c.fork,
        choices=tuple(map(str, Fork)),
    ),
    Field(
        "reply",
        FieldKind.requests,
        "what became of a reply in its session",
        elsewhere=nodes.c.status,
        choices=tuple(map(str, Status)),
    ),
    Field("label", FieldKind.labels, "a label that somebody gave it", elsewhere=trajectory_labels.c.label),
    Field("note", FieldKind.notes, "the text of a note on it", elsewhere=trajectory_labels.c.note),
    Field("text", FieldKind.messages, "the text of one of its messages, reasoning included"),
)
FIELDS: dict[str, Field] = {field.name: field for field in _ALL}
