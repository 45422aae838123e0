"""What an export reads: rows with everything they refer to, in an order that says nothing of the database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import sqlalchemy as sa

from replay.exchange.plain import Bundle
from replay.read import load
from replay.records import ELIGIBLE, UNTRAINABLE, GroupRecord, PolicyRecord, RunRecord, Trajectory
from replay.rows import GROUP_COLUMNS, RUN_COLUMNS, named, run_of
from replay.schema import groups, policies, restored_column, runs, trajectories
from replay.task_records import selected, task_records

_AT_ONCE = 64
"""Whole trajectories in memory."""


@dataclass
class Left:
    """What an export left out."""

    states: Counter[str] = field(default_factory=Counter)
    """Rows by state; only those that can be trained or shown are exchanged."""
    corrupt: dict[str, str] = field(default_factory=dict)
    """Reason by id."""


def exportable(
    connection: sa.Connection, left: Left, *, run: str | None, where: sa.ColumnElement[bool] | None
) -> list[str]:
    """Ids by run, iteration, slot and id; `left` counts the other rows asked for. None: every run, every row."""
    columns = trajectories.c
    # As the database has them: it orders texts its own way, and ExactText is slow a row at a time.
    texts = [sa.type_coerce(column, sa.Text) for column in (columns.run, columns.id, columns.state)]
    query = sa.select(*texts, columns.iteration, columns.slot)
    if run is not None:
        query = query.where(columns.run == run)
    if where is not None:
        query = query.where(where)
    found = connection.execute(query).all()
    if not found:
        return []
    names, ids, states = (restored_column(column) for column in list(zip(*found, strict=True))[:3])
    left.states.update(state for state in states if state not in (ELIGIBLE, UNTRAINABLE))
    kept = [
        (name, row.iteration, row.slot, id)
        for name, id, state, row in zip(names, ids, states, found, strict=True)
        if state in (ELIGIBLE, UNTRAINABLE)
    ]
    return [id for *_, id in sorted(kept)]


def bundles(connection: sa.Connection, ids: Sequence[str], left: Left) -> Iterator[Bundle]:
    """The rows of these ids, in their order; one that is no longer what was written is left out by name."""
    known: dict[str, tuple[RunRecord, dict[int, PolicyRecord]]] = {}
    for start in range(0, len(ids), _AT_ONCE):
        some = ids[start : start + _AT_ONCE]
        loaded = load(connection, some)
        left.corrupt.update(loaded.corrupt)
        rows = [loaded.whole[id] for id in some if id in loaded.whole]
        for run in {row.record.run for row in rows} - known.keys():
            known[run] = _run(connection, run), known_policies(connection, run)
        of_groups = _groups(connection, rows)
        of_tasks = task_records(connection, [row.record.task for row in rows])
        for row in rows:
            run_record, published = known[row.record.run]
            born = named(of_groups, row.record.group, "trajectories.group_id")
            task = named(of_tasks, row.record.task, "trajectories.task")
            yield Bundle(row, born, task, run_record, _sampled_by(row, published))


def _sampled_by(row: Trajectory, published: dict[int, PolicyRecord]) -> tuple[PolicyRecord, ...]:
    """Rows that no policy sampled have one too: the tokenizer is the policy's."""
    versions = {version for part in row.segments for version in part.tokens.policy_versions.tolist()}
    versions |= {row.record.policy_version_min, row.record.policy_version_max}
    return tuple(published[version] for version in sorted(versions) if version in published)


def known_runs(connection: sa.Connection) -> dict[str, RunRecord]:
    return {row.id: run_of(row) for row in connection.execute(sa.select(*RUN_COLUMNS))}


def _run(connection: sa.Connection, id: str) -> RunRecord:
    found = {row.id: row for row in connection.execute(sa.select(*RUN_COLUMNS).where(runs.c.id == id))}
    return run_of(named(found, id, "trajectories.run"))


def known_policies(connection: sa.Connection, run: str) -> dict[int, PolicyRecord]:
    columns = [policies.c[field.name] for field in fields(PolicyRecord)]
    found = connection.execute(sa.select(*columns).where(policies.c.run == run))
    return {row.version: PolicyRecord(*row) for row in found}


def _groups(connection: sa.Connection, rows: Sequence[Trajectory]) -> dict[str, GroupRecord]:
    found = selected(connection, GROUP_COLUMNS, groups.c.id, [row.record.group for row in rows])
    return {row[0]: GroupRecord(*list(row)) for row in found}


def stored_sources(connection: sa.Connection, ids: Sequence[str]) -> dict[str, str]:
    """Of those ids that are stored."""
    columns = [trajectories.c.id, trajectories.c.source]
    return {row.id: row.source for row in selected(connection, columns, trajectories.c.id, ids)}
