"""Reads rows for an export, with everything they refer to, in an order that does not depend on the database.

Transactions are short, because during a long transaction a database must keep everything that others write. Each row is
as it was at one moment; different rows may be of different moments.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import sqlalchemy as sa

from context.tokens.session_segments import conversations_of
from replay.exchange.files import ROWS_AT_ONCE
from replay.exchange.row_format import Bundle, Tools
from replay.records import (
    ELIGIBLE,
    EVICTED,
    UNTRAINABLE,
    WHOLE_ENDS,
    GroupRecord,
    PolicyRecord,
    RunRecord,
    StopReason,
    TaskRecord,
    Trajectory,
    TrajectoryRecord,
)
from replay.storage.format.rows import GROUP_COLUMNS, RUN_COLUMNS, run_of
from replay.storage.format.schema import groups, nodes, policies, runs, trajectories
from replay.storage.labels import labels_of
from replay.storage.read import load, task_records
from replay.storage.statements import selected
from replay.store import ReplayStore

_EXCHANGED = (ELIGIBLE, UNTRAINABLE)
_REPEATED = "of equal tokens"
_Known = dict[str, tuple[RunRecord, dict[int, PolicyRecord]]]
_rows = trajectories.c


@dataclass
class ExportReport:
    rows: int = 0
    left: Counter[str] = field(default_factory=Counter)
    """The number of rows left out, by state or reason. A row pruned during the export counts as `evicted`."""
    corrupt: dict[str, str] = field(default_factory=dict)
    """Reasons why rows could not be read, by id."""


def exportable(store: ReplayStore, report: ExportReport, where: sa.ColumnElement[bool]) -> list[str]:
    """Ids of the rows to export, in the order of run, iteration, slot and id. The report counts the other rows."""
    query = sa.select(_rows.run, _rows.iteration, _rows.slot, _rows.id, _rows.state).where(where)
    with store.reading() as connection:
        found = connection.execute(query).all()
    report.left.update(row.state for row in found if row.state not in _EXCHANGED)
    # Sorted here, for databases differ in the order of texts.
    return [id for *_, id, state in sorted(map(tuple, found)) if state in _EXCHANGED]


def whole_with_known_tools(environments: Iterable[tuple[str, str]]) -> sa.ColumnElement[bool]:
    """A condition for rows whose tools are known, and that ended with an answer, by the environment or with a win.

    `environments` are the names and versions with known tools. A session's row holds its own tools.
    """
    known: list[sa.ColumnElement[bool]] = [_rows.id.in_(sa.select(nodes.c.trajectory))]
    for name, version in environments:
        known.append((_rows.environment == name) & (_rows.environment_version == version))
    won_at_last = sa.and_(_rows.success, _rows.stop_reason == StopReason.MAX_TURNS)
    return sa.and_(_rows.stop_reason.in_(WHOLE_ENDS) | won_at_last, sa.or_(*known))


def bundles(
    store: ReplayStore,
    ids: Sequence[str],
    report: ExportReport,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    unique: bool = False,
) -> Iterator[Bundle]:
    """The rows of these ids, in order. A row that can't be read, or is gone by now, is left out and reported, and with
    `unique` each row whose tokens are those of an earlier one."""
    known: _Known = {}
    seen: set[bytes] = set()
    for start in range(0, len(ids), ROWS_AT_ONCE):
        with store.reading() as connection:
            page = _bundles(connection, ids[start : start + ROWS_AT_ONCE], report, known)
        for row in page:
            tokens = [part.tokens.token_ids.tobytes() for part in row.trajectory.segments]
            digest = hashlib.sha256(repr(tokens).encode()).digest()
            if unique and digest in seen:
                report.left[_REPEATED] += 1
                continue
            seen.add(digest)
            yield row
            report.rows += 1
            progress(report.rows, len(ids))


def _bundles(connection: sa.Connection, ids: Sequence[str], report: ExportReport, known: _Known) -> list[Bundle]:
    rows = _readable(connection, ids, report)
    for row in rows:
        _look_up_run(connection, row.record, known)
    found = selected(connection, GROUP_COLUMNS, groups.c.id, [row.record.group for row in rows])
    columns = (_rows.id, _rows.created_at)
    times = {row.id: row.created_at for row in selected(connection, columns, _rows.id, [row.id for row in rows])}
    groups_by_id = {record.id: record for record in (GroupRecord(*columns) for columns in map(tuple, found))}
    tasks_by_hash = task_records(connection, [row.record.task for row in rows])
    labels = labels_of(connection, [row.id for row in rows])
    run_labels = labels_of(connection, list({row.record.run for row in rows}), "run")
    made = []
    for row in rows:
        run, published = known[row.record.run]
        versions = _versions_of(row, newest=max(published, default=0))
        made.append(
            Bundle(
                trajectory=row,
                group=groups_by_id[row.record.group],
                task=tasks_by_hash[row.record.task],
                run=run,
                policies=tuple(published[version] for version in sorted(versions) if version in published),
                labels=tuple(labels.get(row.id, ())),
                run_labels=tuple(run_labels.get(run.id, ())),
                created_at=times[row.id],
                tools=_own_tools(row, tasks_by_hash[row.record.task]),
            )
        )
    return made


def _own_tools(row: Trajectory, task: TaskRecord) -> Tools | None:
    """The tools of an agent's last request, or those of a task with its own. None: those of the environment."""
    if row.nodes:
        return [*conversations_of(row.nodes)][-1][1]
    return None if task.tools is None else list(json.loads(task.tools))


def _readable(connection: sa.Connection, ids: Sequence[str], report: ExportReport) -> list[Trajectory]:
    """Yield the rows that can be exchanged, in the order of `ids`. The report counts the other rows."""
    loaded = load(connection, ids)
    report.corrupt.update(loaded.corrupt)
    rows = []
    for id in ids:
        state = loaded.whole[id].record.state if id in loaded.whole else EVICTED
        if state in _EXCHANGED:
            rows.append(loaded.whole[id])
        elif id not in loaded.corrupt:
            report.left[state] += 1
    return rows


def _look_up_run(connection: sa.Connection, record: TrajectoryRecord, known: _Known) -> None:
    """Read the row's run and its policies into `known`. Read them again if a policy has been published since."""
    if record.run not in known or record.policy_version_max not in known[record.run][1]:
        run = known_runs(connection, record.run)[record.run]
        known[record.run] = run, known_policies(connection, record.run)


def _versions_of(row: Trajectory, newest: int) -> set[int]:
    """The policy versions that a row names, and its run's newest, to which its staleness is counted. A row that no
    policy sampled names one for its tokenizer."""
    sampled = {version for part in row.segments for version in part.tokens.policy_versions.tolist()}
    return sampled | {row.record.policy_version_min, row.record.policy_version_max, newest}


def known_runs(connection: sa.Connection, id: str | None = None) -> dict[str, RunRecord]:
    """All runs by id, or only the run `id` if it is stored."""
    query = sa.select(*RUN_COLUMNS)
    found = connection.execute(query if id is None else query.where(runs.c.id == id))
    return {row.id: run_of(row) for row in found}


def known_policies(connection: sa.Connection, run: str) -> dict[int, PolicyRecord]:
    columns = [policies.c[field.name] for field in fields(PolicyRecord)]
    found = connection.execute(sa.select(*columns).where(policies.c.run == run))
    return {row.version: PolicyRecord(*row) for row in found}


def stored_sources(connection: sa.Connection, ids: Sequence[str]) -> dict[str, str]:
    """The sources of the stored rows with these ids."""
    columns = [trajectories.c.id, trajectories.c.source]
    return {row.id: row.source for row in selected(connection, columns, trajectories.c.id, ids)}
