"""The tables. Each field of a record is a column, and arrays are typed blobs. Facts, tokens and texts are in different
tables, so that questions about rewards never read a token. A database of another `REVISION` is refused: raise it when
you change a table or a record."""

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import sqlalchemy as sa

from replay import records
from replay.storage.collecting.ticket_records import PlannedBatch, TicketRecord
from replay.storage.format.column_types import ExactText, column_types, types_in

REVISION = "0023"
"""Four digits. A newer agentloop has a greater number."""


def _columns(kind: Any, **info: Any) -> Callable[..., sa.Column[Any]]:
    def make(name: str, *, null: bool = False, **options: Any) -> sa.Column[Any]:
        return sa.Column(name, kind, nullable=null, info=info, **options)

    return make


_text = _columns(ExactText)
_json = _columns(ExactText, json=True)
_integer = _columns(sa.BigInteger, range=(-(2**63), 2**63 - 1))
_size = _columns(sa.BigInteger, range=(1, 2**31))
_counter = _columns(sa.BigInteger, range=(0, 2**62))
# Sums of greater numbers could be infinite.
_real = _columns(sa.Double, range=(-1e300, 1e300))
_share = _columns(sa.Double, range=(0, 1))
_measured = _columns(sa.Double, range=(-float("inf"), float("inf")))
_truth = _columns(sa.Boolean, range=(0, 1))
_KINDS = {str: _text, int: _integer, float: _real, bool: _truth}


def _key(name: str, target: str | None = None, **options: Any) -> sa.Column[str]:
    reference = [sa.ForeignKey(target)] if target else []
    return sa.Column(name, ExactText, *reference, nullable=False, **options)


def _number(name: str) -> sa.Column[int]:
    """An integer of a table's key."""
    return _integer(name, primary_key=True, autoincrement=False)


def _blob(name: str) -> sa.Column[bytes]:
    return sa.Column(name, sa.LargeBinary, nullable=False)


def _said() -> list[sa.Column[Any]]:
    """The columns of all messages of an episode: one JSON text (`rows.to_text`), which PostgreSQL compresses itself."""
    said: sa.Column[Any] = sa.Column("said", sa.LargeBinary().with_variant(sa.Text(), "postgresql"), nullable=False)
    return [_integer("num_messages"), said, _integer("checksum")]


def _fields(record: type, names: Sequence[str] = (), **given: sa.Column[Any]) -> list[sa.Column[Any]]:
    """Columns for the named fields of a record, or for all fields with one value. `given` columns replace those that
    annotations can't describe."""
    kinds = column_types(record)

    def column(name: str) -> sa.Column[Any]:
        (kind,) = types_in(kinds[name]) - {NoneType}
        return _KINDS[kind](name, null=NoneType in types_in(kinds[name]))

    return [given[name] if name in given else column(name) for name in names or kinds]


def _node() -> list[sa.Column[Any]]:
    """The columns of a request of a session, without its messages."""
    return [
        _number("number"),
        _integer("parent", null=True),
        _integer("kept_tokens"),
        _integer("kept_messages"),
        _text("tools"),
        _text("fork", null=True),
        _text("status"),
        _text("agent"),
        _blob("offered"),
        _integer("num_messages"),
        _integer("num_sampled"),
        _integer("num_tokens"),
        _blob("tokens"),
    ]


def _run_key() -> sa.Column[str]:
    return _key("run", "runs.id", primary_key=True)


def _group() -> sa.Column[str]:
    """The column of a row's group. It is called `group_id`, for `group` is a word of SQL."""
    return _key("group_id", "groups.id", key="group")


metadata = sa.MetaData()

runs = sa.Table(
    "runs",
    metadata,
    *_fields(records.RunRecord, id=_key("id", primary_key=True)),
    _json("config"),
    _json("fingerprint", null=True),
    _text("started_at"),
    # See `replay.storage.counters`.
    _integer("epoch", server_default="0", doc="How often it has been resumed."),
    # See `replay.storage.collecting.participants`.
    _text("leader", null=True, doc="Its one learner."),
    _real("leader_due", null=True, doc="Until when its learner counts as alive, in seconds of the database's clock."),
    _truth("ended", server_default=sa.false(), doc="Nothing more is to be done for it."),
)

policies = sa.Table(
    "policies",
    metadata,
    *_fields(records.PolicyRecord, run=_run_key(), version=_number("version")),
    _text("created_at"),
)

tasks = sa.Table("tasks", metadata, *_fields(records.TaskRecord, hash=_key("hash", primary_key=True)), _json("payload"))

observations = sa.Table(
    "observations",
    metadata,
    *_fields(records.ObservationRecord, id=_key("id", primary_key=True), task=_key("task", "tasks.hash")),
    _text("arguments"),
    _text("checksum"),
    sa.Index("observations_by_task", "task"),
)

# Episodes of evaluations. Those that were imported or are of an older agentloop have no task in `tasks`.
held_out = sa.Table(
    "held_out",
    metadata,
    *_fields(records.HeldOutEpisode, run=_run_key(), iteration=_number("iteration"), number=_number("number")),
    *_said(),
    sa.Index("held_out_by_task", "run", "task", "iteration"),
)

groups = sa.Table(
    "groups",
    metadata,
    *_fields(
        records.GroupRecord,
        id=_key("id", primary_key=True),
        run=_key("run", "runs.id"),
        task=_key("task", "tasks.hash"),
        size=_size("size"),
        success_rate=_share("success_rate"),
    ),
    sa.Index("groups_by_run", "run", "iteration"),
    sa.Index("groups_by_task", "task", "run"),
)

_PLACE = ("run", "iteration", "slot", "id")
_LOOKED_AT = (
    *("group", "source", "reward", "success", "advantage", "stop_reason", "num_turns", "num_tool_calls"),
    *("num_tokens", "num_action_tokens", "policy_version_min", "state", "uses"),
)
"""Columns that sort lists, or that statistics read of all rows of a run."""

IMPORTED = " and ".join(f"source <> '{source}'" for source in records.OWN_SOURCES)
"""The condition of imported rows of `trajectories`, as SQL text: a partial index is found by this text."""


def _part(condition: str) -> dict[str, Any]:
    """The options of an index over the rows that meet the condition."""
    return dict.fromkeys(("sqlite_where", "postgresql_where"), sa.text(condition))


trajectories = sa.Table(
    "trajectories",
    metadata,
    *_fields(
        records.TrajectoryRecord,
        id=_key("id", primary_key=True),
        run=_key("run", "runs.id"),
        group=_group(),
        task=_key("task", "tasks.hash"),
        mean_behavior_log_prob=_real("mean_behavior_log_prob", null=True),
        min_behavior_log_prob=_real("min_behavior_log_prob", null=True),
    ),
    _text("state_reason", null=True),
    _text("created_at"),
    _integer("changed", server_default="1"),
    _integer("num_bytes", null=True),
    _integer("num_messages", null=True),
    _integer("segments_checksum", null=True),
    # See `replay.storage.format.rows.CHECKED_COLUMNS`.
    _integer("record_checksum", null=True),
    # See `replay.storage.draw_records`.
    _integer("uses", server_default="0", doc="Committed draws of it for replay, by whichever run."),
    # Changes of one run, and of imported rows: see `replay.sampling.eligible_index`.
    sa.Index("trajectories_by_change", "run", "changed"),
    sa.Index("imports_by_change", "changed", **_part(IMPORTED)),
    sa.Index("trajectories_by_parent", "parent", **_part("parent is not null")),
    sa.Index("trajectories_by_state", "state"),
    # In a file the index holds all these columns, so that lists read no rows. A server limits an entry to 2,700 bytes,
    # and texts may be longer.
    sa.Index("trajectories_by_run", *_PLACE, *_LOOKED_AT).ddl_if(dialect="sqlite"),
    sa.Index("trajectories_by_run", *_PLACE).ddl_if(dialect="postgresql"),
    sa.Index("trajectories_by_group", "group"),
    sa.Index("trajectories_by_task", "task"),
)

FACTS = (
    *("id", "group", "slot", "member", "attempt", "source", "reward", "success", "advantage", "num_action_tokens"),
    *("policy_version_min", "parent"),
)
"""Columns of a row that stay in `reclaimed` after it is deleted. They never change."""

_NO_ATTEMPT = f"source = '{records.HINDSIGHT}' or replace(state_reason, '{records.ORPHANED}', '') <> state_reason"
"""The condition of rows that do not count in their task's success rate: hindsight, and orphaned rows."""
# The facts that stay of a deleted row. Run, iteration and task are those of its group.
reclaimed = sa.Table(
    "reclaimed",
    metadata,
    *_fields(records.TrajectoryRecord, FACTS, id=_key("id", primary_key=True), group=_group()),
    _text("state_reason"),
    _integer("changed"),
    sa.Index("reclaimed_by_change", "changed"),
    sa.Index("reclaimed_no_attempts", "group", **_part(_NO_ATTEMPT)),
)

segments = sa.Table(
    "segments",
    metadata,
    _key("trajectory", "trajectories.id", primary_key=True),
    _number("position"),
    _text("reason"),
    _text("behavior_context"),
    _integer("num_tokens"),
    _blob("tokens"),
)

# The requests of an agent's session, from which the training sequences of its trajectory follow: it has no `segments`.
# See `context.tokens.session_nodes`.
nodes = sa.Table("nodes", metadata, _key("trajectory", "trajectories.id", primary_key=True), *_node())

# Sessions that have not ended: see `replay.storage.sessions`.
sessions = sa.Table("sessions", metadata, _key("id", primary_key=True), _key("run", "runs.id"), _text("opened_at"))

session_nodes = sa.Table(
    "session_nodes",
    metadata,
    _key("session", "sessions.id", primary_key=True),
    *_node(),
    *_said()[1:],
    _integer("node_checksum"),
)

messages = sa.Table("messages", metadata, _key("trajectory", "trajectories.id", primary_key=True), *_said())

draws = sa.Table(
    "draws",
    metadata,
    # The trajectory is a row of `trajectories`, or of `reclaimed` after its deletion.
    *_fields(
        records.DrawRecord,
        run=_run_key(),
        iteration=_number("iteration"),
        slot=_number("slot"),
        weight=_real("weight", server_default="1"),
    ),
    _integer("sequence", server_default="0"),
    sa.Index("draws_by_trajectory", "trajectory"),
    sa.Index("reservations_by_sequence", "sequence", **_part(f"state = '{records.RESERVED}'")),
)

iterations = sa.Table(
    "iterations", metadata, *_fields(records.IterationRecord, run=_run_key(), iteration=_number("iteration"))
)

metrics = sa.Table(
    "metrics", metadata, _run_key(), _number("iteration"), _key("name", primary_key=True), _measured("value", null=True)
)

sampler_state = sa.Table("sampler_state", metadata, _run_key(), _number("iteration"), _json("state"))

token_scores = sa.Table(
    "token_scores",
    metadata,
    _key("trajectory", "trajectories.id", primary_key=True),
    _number("position"),
    _key("run", "runs.id"),
    _integer("policy_version"),
    _blob("log_probs"),
)

# Episodes that workers collect, one row each: see `replay.storage.collecting`.
tickets = sa.Table(
    "tickets",
    metadata,
    *_fields(
        TicketRecord,
        run=_run_key(),
        number=_number("number"),
        member=_number("member"),
        task=_key("task", "tasks.hash"),
    ),
    _text("state"),
    _text("holder", null=True),
    _integer("fence", server_default="0", doc="How often it has been claimed: the number of its newest claim."),
    _real("due", null=True, doc="When its claim ends, in seconds of the database's clock."),
    _integer("tries", server_default="0", doc="Claims that were not given back."),
    _text("reason", null=True),
    _text("trajectory", null=True, doc="Of `trajectories`, or of `reclaimed` once it was evicted."),
    _json("outcome", null=True, doc="What an evaluation found, of which no trajectory is stored."),
    _real("issued_at", doc="In seconds of the database's clock."),
    _real("ended_at", null=True, doc="In seconds of the database's clock."),
    _integer("closed_at", null=True, doc="Policy version when its group was closed."),
    _integer("late_at", null=True, doc="Policy version when it was too late to be fresh."),
    sa.Index("tickets_by_trajectory", "trajectory", unique=True),
    sa.Index("unclosed_tickets", "run", "purpose", "number", "member", **_part("closed_at IS NULL")),
)

# The plan of each batch that workers collect, as it was when its tickets were issued.
planned_batches = sa.Table(
    "planned_batches", metadata, *_fields(PlannedBatch, run=_run_key(), iteration=_number("iteration")), _json("plan")
)

workers, engines = (
    sa.Table(
        name, metadata, _run_key(), _key("id", primary_key=True), _json("facts"), _real("started_at"), _real("seen_at")
    )
    for name in ("workers", "engines")
)

# Labels that people give to trajectories and runs. No draw, hash or checksum depends on them.
trajectory_labels, run_labels = (
    sa.Table(f"{kind}_labels", metadata, key, *_fields(records.Label, label=_key("label", primary_key=True)))
    for kind, key in {
        "trajectory": _key("trajectory", "trajectories.id", primary_key=True),
        "run": _run_key(),
    }.items()
)

# Counters: see `replay.storage.counters`.
buffer_state = sa.Table("buffer_state", metadata, _key("name", primary_key=True), _counter("value"))

schema_version = sa.Table(
    "replay_schema_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True)
)
