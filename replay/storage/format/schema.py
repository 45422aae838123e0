"""The tables. Facts are columns, arrays are typed blobs; nothing is ordered by wall clock.

Metadata, payload and text stand in tables of their own, so that questions about rewards never read a token.
A database of another `REVISION` is refused: whoever changes a table here raises it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from replay.records import OWN_SOURCES, RESERVED
from replay.storage.format.column_types import ExactText

REVISION = "0013"
"""Four digits: a greater number was written by a newer agentloop."""


def _columns(kind: Any, **info: Any) -> Callable[..., sa.Column[Any]]:
    def make(name: str, *, null: bool = False, **options: Any) -> sa.Column[Any]:
        return sa.Column(name, kind, nullable=null, info=info, **options)

    return make


_text = _columns(ExactText)
_json = _columns(ExactText, json=True)
_integer = _columns(sa.BigInteger, range=(-(2**63), 2**63 - 1))
_size = _columns(sa.BigInteger, range=(1, 2**31))
# Greater ones have no sums.
_real = _columns(sa.Double, range=(-1e300, 1e300))
_share = _columns(sa.Double, range=(0, 1))
_measured = _columns(sa.Double, range=(-float("inf"), float("inf")))
_truth = _columns(sa.Boolean, range=(0, 1))


def _key(name: str, target: str | None = None, **options: Any) -> sa.Column[str]:
    reference = [sa.ForeignKey(target)] if target else []
    return sa.Column(name, ExactText, *reference, nullable=False, **options)


def _blob(name: str) -> sa.Column[bytes]:
    return sa.Column(name, sa.LargeBinary, nullable=False)


metadata = sa.MetaData()

runs = sa.Table(
    "runs",
    metadata,
    _key("id", primary_key=True),
    _text("name"),
    _json("config"),
    _text("authors"),
    _text("authors_hash"),
    _text("code_version"),
    _text("started_at"),
    _json("fingerprint", null=True),
    # How often it has been resumed: see `replay.storage.counters`.
    _integer("epoch", server_default="0"),
    # Its one learner, and until when it counts as alive: see `replay.storage.collecting.participants`.
    _text("leader", null=True),
    _real("leader_due", null=True),
    # Nothing more is to be done for it.
    _truth("ended", server_default=sa.false()),
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
    _text("sha256", null=True),
    _text("probe", null=True),
)

tasks = sa.Table(
    "tasks",
    metadata,
    _key("hash", primary_key=True),
    _text("environment"),
    _json("payload"),
)

observations = sa.Table(
    "observations",
    metadata,
    _key("id", primary_key=True),
    _key("task", "tasks.hash"),
    _text("environment"),
    _text("parent", null=True),
    _text("tool"),
    _text("arguments"),
    _text("content"),
    _text("checksum"),
    sa.Index("observations_by_task", "task"),
)

# Episodes of evaluations, with all their messages as `messages` has them. Their tasks are not in `tasks`.
held_out = sa.Table(
    "held_out",
    metadata,
    _key("run", "runs.id", primary_key=True),
    _integer("iteration", primary_key=True, autoincrement=False),
    _integer("number", primary_key=True, autoincrement=False),
    _text("task"),
    _text("environment"),
    _text("environment_version"),
    _real("reward"),
    _truth("success"),
    _text("stop_reason"),
    _text("error_kind", null=True),
    _integer("num_turns"),
    _integer("num_tool_calls"),
    _integer("num_messages"),
    sa.Column("said", sa.LargeBinary().with_variant(sa.Text(), "postgresql"), nullable=False),
    _integer("checksum"),
    sa.Index("held_out_by_task", "run", "task", "iteration"),
)

groups = sa.Table(
    "groups",
    metadata,
    _key("id", primary_key=True),
    _key("run", "runs.id"),
    _key("task", "tasks.hash"),
    _integer("iteration"),
    _size("size"),
    _real("reward_mean"),
    _real("reward_std"),
    _share("success_rate"),
    sa.Index("groups_by_run", "run", "iteration"),
    sa.Index("groups_by_task", "task", "run"),
)

_PLACE = ("run", "iteration", "slot", "id")
"""The place of a row in its run's list."""
_LOOKED_AT = (
    *("group", "source", "reward", "success", "advantage", "stop_reason", "num_turns", "num_tool_calls"),
    *("num_tokens", "num_action_tokens", "policy_version_min", "state", "uses"),
)
"""What lists are sorted by, and what statistics count, of all rows of a run."""

IMPORTED = " and ".join(f"source <> '{source}'" for source in OWN_SOURCES)
"""SQL of rows of `trajectories`: an index of a part of a table is found by the text of its condition."""
_HAS_PARENT = sa.text("parent is not null")
_IMPORTED, _RESERVED = sa.text(IMPORTED), sa.text(f"state = '{RESERVED}'")

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
    _truth("success"),
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
    # See `replay.storage.format.rows.CHECKED_COLUMNS`.
    _integer("record_checksum", null=True),
    # Committed draws of it for replay, by whichever run: see `replay.storage.draws`.
    _integer("uses", server_default="0"),
    _integer("num_messages", null=True),
    _integer("segments_checksum", null=True),
    # What has changed of one run, and of what was imported: see `replay.sampling.index`.
    sa.Index("trajectories_by_change", "run", "changed"),
    sa.Index("imports_by_change", "changed", sqlite_where=_IMPORTED, postgresql_where=_IMPORTED),
    sa.Index("trajectories_by_parent", "parent", sqlite_where=_HAS_PARENT, postgresql_where=_HAS_PARENT),
    sa.Index("trajectories_by_token_hash", "token_hash"),
    sa.Index("trajectories_by_state", "state"),
    # A file's holds what is looked at, so that no rows are read for it. An entry of a server's has at most 2,700 bytes,
    # and texts may be longer.
    sa.Index("trajectories_by_run", *_PLACE, *_LOOKED_AT).ddl_if(dialect="sqlite"),
    sa.Index("trajectories_by_run", *_PLACE).ddl_if(dialect="postgresql"),
    sa.Index("trajectories_by_group", "group"),
    sa.Index("trajectories_by_task", "task"),
)

# What is left of an evicted row: whose it was, how it ended, and why it went. Run, iteration and task are its group's.
reclaimed = sa.Table(
    "reclaimed",
    metadata,
    _key("id", primary_key=True),
    _key("group_id", "groups.id", key="group"),
    _integer("slot"),
    _integer("member"),
    _integer("attempt"),
    _text("source"),
    _real("reward"),
    _truth("success"),
    _real("advantage"),
    _integer("num_action_tokens"),
    _integer("policy_version_min"),
    _text("parent", null=True),
    _text("state_reason"),
    _integer("changed"),
    sa.Index("reclaimed_by_change", "changed"),
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
    # Of `trajectories`, or of `reclaimed` once it was evicted.
    _key("trajectory"),
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
    # What the sampler multiplied its loss by.
    _real("weight", null=True),
    sa.Index("draws_by_trajectory", "trajectory"),
    sa.Index("reservations_by_sequence", "sequence", sqlite_where=_RESERVED, postgresql_where=_RESERVED),
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
    _measured("value", null=True),
)

sampler_state = sa.Table(
    "sampler_state",
    metadata,
    _key("run", "runs.id", primary_key=True),
    _integer("iteration", primary_key=True, autoincrement=False),
    _json("state"),
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

# Episodes that workers collect, one row each: see `replay.storage.collecting`. Times are seconds of the database's
# clock.
_UNCLOSED = sa.text("closed_at IS NULL")
tickets = sa.Table(
    "tickets",
    metadata,
    _key("run", "runs.id", primary_key=True),
    # Of its group.
    _integer("number", primary_key=True, autoincrement=False),
    _integer("member", primary_key=True, autoincrement=False),
    _key("task", "tasks.hash"),
    # The iteration it was planned for.
    _integer("iteration"),
    _text("purpose"),
    _text("state"),
    _text("holder", null=True),
    # How often it has been claimed, by whomever: the number of its newest claim.
    _integer("fence", server_default="0"),
    _real("due", null=True),
    # Claims that were not given back.
    _integer("tries", server_default="0"),
    _text("reason", null=True),
    # Of `trajectories`, or of `reclaimed` once it was evicted.
    _text("trajectory", null=True),
    # What an evaluation found, of which no trajectory is stored.
    _json("outcome", null=True),
    _real("issued_at"),
    _real("ended_at", null=True),
    # Policy versions: when its group was closed, and when it was too late to be fresh.
    _integer("closed_at", null=True),
    _integer("late_at", null=True),
    sa.Index("tickets_by_trajectory", "trajectory", unique=True),
    sa.Index(
        *("unclosed_tickets", "run", "purpose", "number", "member"),
        sqlite_where=_UNCLOSED,
        postgresql_where=_UNCLOSED,
    ),
)

# What each batch that workers collect is to be made of, as it was when its tickets were issued.
planned_batches = sa.Table(
    "planned_batches",
    metadata,
    _key("run", "runs.id", primary_key=True),
    _integer("iteration", primary_key=True, autoincrement=False),
    _json("plan"),
)


def _participants(name: str) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        _key("run", "runs.id", primary_key=True),
        _key("id", primary_key=True),
        _json("facts"),
        _real("started_at"),
        _real("seen_at"),
    )


workers, engines = _participants("workers"), _participants("engines")

# Counters: see `replay.storage.counters`.
buffer_state = sa.Table(
    "buffer_state",
    metadata,
    _key("name", primary_key=True),
    _integer("value"),
)

schema_version = sa.Table(
    "replay_schema_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True)
)
