"""What an export reads: rows with everything they refer to, in an order that says nothing of the database.

It is read in short transactions, for a long one keeps a database from tidying up behind its writers. Each row is whole
and as it was at one moment, and the rows are not all of the same moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import sqlalchemy as sa

from replay.exchange.row_format import Bundle
from replay.records import ELIGIBLE, EVICTED, UNTRAINABLE, GroupRecord, PolicyRecord, RunRecord, Trajectory
from replay.storage.format.column_types import restored_column
from replay.storage.format.rows import GROUP_COLUMNS, RUN_COLUMNS, run_of
from replay.storage.format.schema import groups, policies, runs, trajectories
from replay.storage.read import load, task_records
from replay.storage.statements import selected
from replay.store import ReplayStore

_AT_ONCE = 64
"""Whole trajectories of one transaction, and in memory."""
_IDS_AT_ONCE = 10_000
"""Ids of one transaction."""
_EXCHANGED = (ELIGIBLE, UNTRAINABLE)


@dataclass
class NotExported:
    """What an export left out."""

    states: Counter[str] = field(default_factory=Counter)
    """Rows by state; only those that can be trained or shown are exchanged. Rows that went meanwhile are `evicted`."""
    corrupt: dict[str, str] = field(default_factory=dict)
    """Reason by id."""


def exportable(
    store: ReplayStore, left: NotExported, *, run: str | None, where: sa.ColumnElement[bool] | None
) -> list[str]:
    """Ids by run, iteration, slot and id; `left` counts the other rows asked for. None: every run, every row.

    Rows that are written meanwhile may be among them or not.
    """
    asked = [] if run is None else [trajectories.c.run == run]
    asked += [] if where is None else [where]
    found: list[tuple[str, int, int, str]] = []
    first: str | None = ""
    while first is not None:
        with store.reading() as connection:
            last = connection.scalar(_IDS.where(_id > first).offset(_IDS_AT_ONCE - 1).limit(1))
            between = [_id > first] if last is None else [_id > first, _id <= last]
            found += _page(connection, left, [*between, *asked])
        first = last
    return [id for *_, id in sorted(found)]


# As the database has them: it orders texts its own way, and ExactText is slow a row at a time.
_TEXTS = [trajectories.c[name] for name in ("run", "id", "state")]
_in_run, _id, _state = (sa.type_coerce(column, sa.Text) for column in _TEXTS)
_IDS = sa.select(_id).order_by(_id)


def _page(
    connection: sa.Connection, left: NotExported, asked: Sequence[sa.ColumnElement[bool]]
) -> list[tuple[str, int, int, str]]:
    """Run, iteration, slot and id of the rows asked for."""
    query = sa.select(_in_run, _id, _state, trajectories.c.iteration, trajectories.c.slot).where(*asked)
    found = connection.execute(query).all()
    if not found:
        return []
    names, ids, states = map(restored_column, _TEXTS, zip(*found, strict=True))
    left.states.update(state for state in states if state not in _EXCHANGED)
    return [
        (name, row.iteration, row.slot, id)
        for name, id, state, row in zip(names, ids, states, found, strict=True)
        if state in _EXCHANGED
    ]


def bundles(store: ReplayStore, ids: Sequence[str], left: NotExported) -> Iterator[Bundle]:
    """The rows of these ids, in their order; one that is no longer what was written is left out by name.

    One that is no longer there, or was evicted since its id was read, is counted.
    """
    known: dict[str, tuple[RunRecord, dict[int, PolicyRecord]]] = {}
    for start in range(0, len(ids), _AT_ONCE):
        with store.reading() as connection:
            page = _bundles(connection, ids[start : start + _AT_ONCE], left, known)
        yield from page


def _bundles(
    connection: sa.Connection,
    ids: Sequence[str],
    left: NotExported,
    known: dict[str, tuple[RunRecord, dict[int, PolicyRecord]]],
) -> list[Bundle]:
    loaded = load(connection, ids)
    left.corrupt.update(loaded.corrupt)
    rows = [row for id in ids if (row := loaded.whole.get(id)) is not None and row.record.state in _EXCHANGED]
    went = [id for id in ids if id not in loaded.whole and id not in loaded.corrupt]
    left.states.update([EVICTED] * len(went))
    left.states.update(row.record.state for row in loaded.whole.values() if row.record.state not in _EXCHANGED)
    for record in (row.record for row in rows):
        # A policy may have been published since they were read.
        if record.run not in known or record.policy_version_max not in known[record.run][1]:
            run = known_runs(connection, record.run)[record.run]
            known[record.run] = run, known_policies(connection, record.run)
    of_groups = _groups(connection, rows)
    of_tasks = task_records(connection, [row.record.task for row in rows])
    found = []
    for row in rows:
        run_record, published = known[row.record.run]
        group = of_groups[row.record.group]
        task = of_tasks[row.record.task]
        found.append(Bundle(row, group, task, run_record, _sampled_by(row, published)))
    return found


def _sampled_by(row: Trajectory, published: dict[int, PolicyRecord]) -> tuple[PolicyRecord, ...]:
    """Rows that no policy sampled have one too: the tokenizer is the policy's."""
    versions = {version for part in row.segments for version in part.tokens.policy_versions.tolist()}
    versions |= {row.record.policy_version_min, row.record.policy_version_max}
    return tuple(published[version] for version in sorted(versions) if version in published)


def known_runs(connection: sa.Connection, id: str | None = None) -> dict[str, RunRecord]:
    """By id; with `id`, that one if it is known."""
    query = sa.select(*RUN_COLUMNS)
    found = connection.execute(query if id is None else query.where(runs.c.id == id))
    return {row.id: run_of(row) for row in found}


def known_policies(connection: sa.Connection, run: str) -> dict[int, PolicyRecord]:
    columns = [policies.c[field.name] for field in fields(PolicyRecord)]
    found = connection.execute(sa.select(*columns).where(policies.c.run == run))
    return {row.version: PolicyRecord(*row) for row in found}


def _groups(connection: sa.Connection, rows: Sequence[Trajectory]) -> dict[str, GroupRecord]:
    found = selected(connection, GROUP_COLUMNS, groups.c.id, [row.record.group for row in rows])
    return {row[0]: GroupRecord(*list(row)) for row in found}


def stored_sources(connection: sa.Connection, ids: Sequence[str]) -> dict[str, str]:
    """Sources by id, as far as these ids are stored."""
    columns = [trajectories.c.id, trajectories.c.source]
    return {row.id: row.source for row in selected(connection, columns, trajectories.c.id, ids)}
