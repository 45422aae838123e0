"""What an export reads: rows with everything they refer to, in an order that says nothing of the database.

It is read in short transactions, for a long one keeps a database from tidying up behind its writers. Each row is whole
and as it was at one moment, and the rows are not all of the same moment.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import sqlalchemy as sa

from replay.exchange.files import ROWS_AT_ONCE
from replay.exchange.row_format import Bundle
from replay.records import ELIGIBLE, EVICTED, UNTRAINABLE, GroupRecord, PolicyRecord, RunRecord, StopReason, Trajectory
from replay.storage.format.rows import GROUP_COLUMNS, RUN_COLUMNS, run_of
from replay.storage.format.schema import groups, nodes, policies, runs, trajectories
from replay.storage.labels import labels_of
from replay.storage.read import load, task_records
from replay.storage.statements import selected
from replay.store import ReplayStore

_EXCHANGED = (ELIGIBLE, UNTRAINABLE)
_Known = dict[str, tuple[RunRecord, dict[int, PolicyRecord]]]
_rows = trajectories.c


@dataclass
class ExportReport:
    rows: int = 0
    left: Counter[str] = field(default_factory=Counter)
    """Rows left out, by state; only those that can be trained or shown are exchanged, and those pruned meanwhile are
    `evicted`."""
    corrupt: dict[str, str] = field(default_factory=dict)
    """Reasons why rows could not be read, by id."""


def exportable(store: ReplayStore, report: ExportReport, where: sa.ColumnElement[bool]) -> list[str]:
    """Ids by run, iteration, slot and id; the report counts the other rows asked for."""
    query = sa.select(_rows.run, _rows.iteration, _rows.slot, _rows.id, _rows.state).where(where)
    with store.reading() as connection:
        found = connection.execute(query).all()
    report.left.update(row.state for row in found if row.state not in _EXCHANGED)
    # Sorted here, as databases order texts in ways of their own.
    return [id for *_, id, state in sorted(map(tuple, found)) if state in _EXCHANGED]


def answered_with_known_tools(environments: Iterable[tuple[str, str]]) -> sa.ColumnElement[bool]:
    """Rows that ended with an answer, of these environments by name and version, or of a session, which holds its own
    tools."""
    known: list[sa.ColumnElement[bool]] = [_rows.id.in_(sa.select(nodes.c.trajectory))]
    for name, version in environments:
        known.append((_rows.environment == name) & (_rows.environment_version == version))
    return sa.and_(_rows.stop_reason == StopReason.ANSWERED, sa.or_(*known))


def bundles(
    store: ReplayStore,
    ids: Sequence[str],
    report: ExportReport,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Bundle]:
    """The rows of these ids, in their order; one that can't be read, or has gone since, is left out and reported."""
    known: _Known = {}
    for start in range(0, len(ids), ROWS_AT_ONCE):
        with store.reading() as connection:
            page = _bundles(connection, ids[start : start + ROWS_AT_ONCE], report, known)
        for row in page:
            yield row
            report.rows += 1
            progress(report.rows, len(ids))


def _bundles(connection: sa.Connection, ids: Sequence[str], report: ExportReport, known: _Known) -> list[Bundle]:
    loaded = load(connection, ids)
    report.corrupt.update(loaded.corrupt)
    found = [loaded.whole[id] for id in ids if id in loaded.whole]
    report.left.update([EVICTED] * sum(id not in loaded.whole and id not in loaded.corrupt for id in ids))
    report.left.update(row.record.state for row in found if row.record.state not in _EXCHANGED)
    rows = [row for row in found if row.record.state in _EXCHANGED]
    for record in (row.record for row in rows):
        # A policy may have been published since they were read.
        if record.run not in known or record.policy_version_max not in known[record.run][1]:
            run = known_runs(connection, record.run)[record.run]
            known[record.run] = run, known_policies(connection, record.run)
    of_groups = selected(connection, GROUP_COLUMNS, groups.c.id, [row.record.group for row in rows])
    by_group = {row[0]: GroupRecord(*list(row)) for row in of_groups}
    by_task = task_records(connection, [row.record.task for row in rows])
    labels = labels_of(connection, [row.id for row in rows])
    of_runs = labels_of(connection, list({row.record.run for row in rows}), "run")
    made = []
    for row in rows:
        (run, published), group, task = known[row.record.run], by_group[row.record.group], by_task[row.record.task]
        by = tuple(published[version] for version in sorted(_versions_of(row)) if version in published)
        of_row, of_run = tuple(labels.get(row.id, ())), tuple(of_runs.get(run.id, ()))
        made.append(Bundle(row, group, task, run, by, of_row, of_run))
    return made


def _versions_of(row: Trajectory) -> set[int]:
    """Rows that no policy sampled name one too: the tokenizer is the policy's."""
    sampled = {version for part in row.segments for version in part.tokens.policy_versions.tolist()}
    return sampled | {row.record.policy_version_min, row.record.policy_version_max}


def known_runs(connection: sa.Connection, id: str | None = None) -> dict[str, RunRecord]:
    """By id; with `id`, that one if it is known."""
    query = sa.select(*RUN_COLUMNS)
    found = connection.execute(query if id is None else query.where(runs.c.id == id))
    return {row.id: run_of(row) for row in found}


def known_policies(connection: sa.Connection, run: str) -> dict[int, PolicyRecord]:
    columns = [policies.c[field.name] for field in fields(PolicyRecord)]
    found = connection.execute(sa.select(*columns).where(policies.c.run == run))
    return {row.version: PolicyRecord(*row) for row in found}


def stored_sources(connection: sa.Connection, ids: Sequence[str]) -> dict[str, str]:
    """Sources by id, as far as these ids are stored."""
    columns = [trajectories.c.id, trajectories.c.source]
    return {row.id: row.source for row in selected(connection, columns, trajectories.c.id, ids)}
