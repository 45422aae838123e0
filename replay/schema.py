"""The tables. Facts are columns, arrays are typed blobs; nothing is ordered by wall clock.

Metadata, payload and text stand in tables of their own, so that questions about rewards never read a token.
A change here needs a new file under `migrations/versions` and a new `REVISION`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

REVISION = "0008"
"""The newest migration. Revisions are numbered: a greater one was written by a newer agentloop."""
VERSION_TABLE = "replay_schema_version"

ESCAPE = "\ue000json:"
"""Before a text that is stored as JSON."""


class ExactText(sa.types.TypeDecorator[str]):
    """Any Python string, returned as it came.

    Databases refuse NUL or lone surrogates, which models and tools do write: such a text is stored as JSON behind a
    private-use mark, every other one as it is.
    """

    impl = sa.Text
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[str | None], str | None]:
        return to_storable

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[str | None], str | None]:
        return _of_column


def storable_column(values: Sequence[str | None]) -> Sequence[str | None]:
    """What ExactText binds, for many values at once."""
    return values if is_storable("".join(filter(None, values))) else [to_storable(value) for value in values]


def restored_column(values: Sequence[str]) -> list[str]:
    """What ExactText returns, for many values at once."""
    return list(values) if ESCAPE not in "".join(values) else [str(_of_column(value)) for value in values]


def to_storable(value: str | None) -> str | None:
    return value if value is None or is_storable(value) else ESCAPE + json.dumps(value)


def from_storable(value: str | None) -> str | None:
    """Raises ValueError for what `to_storable` did not make."""
    if value is None or not value.startswith(ESCAPE):
        return value
    return str(json.loads(value.removeprefix(ESCAPE)))


def _of_column(value: str | None) -> str | None:
    """Of a column, what nobody wrote is shown as it is: the row's checksum tells that it was changed."""
    try:
        return from_storable(value)
    except ValueError:
        return value


def is_storable(text: str) -> bool:
    """Also False for a text that holds the mark somewhere: it would not need to be JSON, and does no harm as JSON."""
    if "\x00" in text or ESCAPE in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(name: str, *, null: bool = False, **options: Any) -> sa.Column[str]:
    return sa.Column(name, ExactText, nullable=null, **options)


def _key(name: str, target: str | None = None, **options: Any) -> sa.Column[str]:
    reference = [sa.ForeignKey(target)] if target else []
    return sa.Column(name, ExactText, *reference, nullable=False, **options)


def _integer(name: str, *, null: bool = False, **options: Any) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=null, **options)


def _real(name: str, *, null: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=null)


def _blob(name: str) -> sa.Column[bytes]:
    return sa.Column(name, sa.LargeBinary, nullable=False)


metadata = sa.MetaData()

runs = sa.Table(
    "runs",
    metadata,
    _key("id", primary_key=True),
    _text("name"),
    _text("config"),
    _text("authors"),
    _text("authors_hash"),
    _text("code_version"),
    _text("started_at"),
    _text("fingerprint", null=True),
    # How often it has been resumed: see `replay.epochs`.
    _integer("epoch", server_default="0"),
)

policies = sa.Table(
    "policies",
    metadata,
    _key("run", "runs.id", primary_key=True),
    _integer("version", primary_key=True, autoincrement=False),
    _text("checkpoint", null=True),
    _text("tokenizer_hash"),
    _text("template_hash"),
    _text("created_at"),
)

tasks = sa.Table(
    "tasks",
    metadata,
    _key("hash", primary_key=True),
    _text("environment"),
    _text("payload"),
)

groups = sa.Table(
    "groups",
    metadata,
    _key("id", primary_key=True),
    _key("run", "runs.id"),
    _key("task", "tasks.hash"),
    _integer("iteration"),
    _integer("size"),
    _real("reward_mean"),
    _real("reward_std"),
    _real("success_rate"),
)

_PLACE = ("run", "iteration", "slot", "id")
"""Of a row in its run's list, to the last one."""
_LOOKED_AT = (
    *("group", "source", "reward", "success", "advantage", "stop_reason", "num_turns", "num_tool_calls"),
    *("num_tokens", "num_action_tokens", "policy_version_min", "state", "uses"),
)
"""What lists are sorted by, and what statistics count, of all rows of a run."""

# `group` is a word of SQL: the column is `group_id`, so that people need no quotes.
trajectories = sa.Table(
    "trajectories",
    metadata,
    _key("id", primary_key=True),
    _key("run", "runs.id"),
    _key("group_id", "groups.id", key="group"),
    _key("task", "tasks.hash"),
    _integer("iteration"),
    _integer("slot"),
    _integer("member"),
    _integer("attempt"),
    _text("source"),
    _real("reward"),
    sa.Column("success", sa.Boolean, nullable=False),
    _real("advantage"),
    _text("stop_reason"),
    _text("error_kind", null=True),
    _integer("num_turns"),
    _integer("num_tool_calls"),
    _integer("num_tokens"),
    _integer("num_action_tokens"),
    _integer("policy_version_min"),
    _integer("policy_version_max"),
    _real("temperature"),
    _real("top_p"),
    _integer("top_k"),
    _text("logprobs_mode"),
    _real("mean_entropy", null=True),
    _real("mean_behavior_log_prob", null=True),
    _real("min_behavior_log_prob", null=True),
    _text("environment"),
    _text("environment_version"),
    _text("content_hash"),
    _text("parent", null=True),
    _text("state"),
    _text("state_reason", null=True),
    _text("created_at"),
    _integer("changed", server_default="1"),
    _text("token_hash", null=True),
    _integer("num_bytes", null=True),
    _integer("record_checksum", null=True),
    # Committed draws of it, by whichever run: see `replay.draws`.
    _integer("uses", server_default="0"),
    sa.Index("trajectories_by_change", "changed"),
    sa.Index("trajectories_by_token_hash", "token_hash"),
    sa.Index("trajectories_by_state", "state"),
    # A file's holds what is looked at, so that no rows are read for it. An entry of a server's has at most 2,700 bytes,
    # and texts may be longer.
    sa.Index("trajectories_by_run", *_PLACE, *_LOOKED_AT).ddl_if(dialect="sqlite"),
    sa.Index("trajectories_by_run", *_PLACE).ddl_if(dialect="postgresql"),
    sa.Index("trajectories_by_group", "group"),
    sa.Index("trajectories_by_task", "task"),
)

segments = sa.Table(
    "segments",
    metadata,
    _key("trajectory", "trajectories.id", primary_key=True),
    _integer("position", primary_key=True, autoincrement=False),
    _text("reason"),
    _text("behavior_context"),
    _integer("num_tokens"),
    _blob("tokens"),
)

# All messages of a trajectory as one JSON text: see `conversation`. PostgreSQL compresses such a text by itself.
messages = sa.Table(
    "messages",
    metadata,
    _key("trajectory", "trajectories.id", primary_key=True),
    _integer("num_messages"),
    sa.Column("said", sa.LargeBinary().with_variant(sa.Text(), "postgresql"), nullable=False),
    _integer("checksum"),
)

draws = sa.Table(
    "draws",
    metadata,
    _key("run", "runs.id", primary_key=True),
    _integer("iteration", primary_key=True, autoincrement=False),
    _integer("slot", primary_key=True, autoincrement=False),
    _key("trajectory", "trajectories.id"),
    _text("stream"),
    _real("probability", null=True),
    _integer("staleness", null=True),
    _text("state"),
    _real("advantage", null=True),
    _real("drift_mean", null=True),
    _real("drift_max", null=True),
    _real("ess_share", null=True),
    _real("approx_kl", null=True),
    _real("clip_fraction", null=True),
    _integer("sequence", server_default="0"),
    sa.Index("draws_by_trajectory", "trajectory"),
)

iterations = sa.Table(
    "iterations",
    metadata,
    _key("run", "runs.id", primary_key=True),
    _integer("iteration", primary_key=True, autoincrement=False),
    _integer("policy_version"),
    _integer("planned_fresh"),
    _integer("planned_replay"),
    _integer("fresh"),
    _integer("replay"),
    _real("fraction"),
    _integer("optimizer_steps"),
)

metrics = sa.Table(
    "metrics",
    metadata,
    _key("run", "runs.id", primary_key=True),
    _integer("iteration", primary_key=True, autoincrement=False),
    _key("name", primary_key=True),
    _real("value", null=True),
)

sampler_state = sa.Table(
    "sampler_state",
    metadata,
    _key("run", "runs.id", primary_key=True),
    _integer("iteration", primary_key=True, autoincrement=False),
    _text("state"),
)

token_scores = sa.Table(
    "token_scores",
    metadata,
    _key("trajectory", "trajectories.id", primary_key=True),
    _integer("position", primary_key=True, autoincrement=False),
    _key("run", "runs.id"),
    _integer("policy_version"),
    _blob("log_probs"),
)

# How a per-token quantity of one update was spread: see `replay.histograms`.
histograms = sa.Table(
    "histograms",
    metadata,
    _key("run", "runs.id", primary_key=True),
    _integer("iteration", primary_key=True, autoincrement=False),
    _key("quantity", primary_key=True),
    _key("stream", primary_key=True),
    _key("age", primary_key=True),
    _blob("counts"),
)

# Counters: see `replay.change`.
buffer_state = sa.Table(
    "buffer_state",
    metadata,
    _key("name", primary_key=True),
    _integer("value"),
)
