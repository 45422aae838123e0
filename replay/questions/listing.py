"""Lists of trajectories, page by page; also lists of labels.

A page begins after the last row of the previous page (keyset paging). Rows that are added meanwhile do not shift pages,
and the thousandth page takes as long as the first.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from replay.errors import DamagedDatabase, ReplayError
from replay.questions.filters import FIELDS, conditions
from replay.questions.filters.query import Query, QueryResult, Sort, chosen, run_is, staleness
from replay.questions.trajectory import NONE, excerpts_of
from replay.records import ELIGIBLE, ORPHANED, UNTRAINABLE
from replay.storage.format import schema
from replay.storage.format.rows import chunked
from replay.storage.format.views import DRIFT, NUM_TOOL_ERRORS, TOKEN_GAP_MAX
from replay.storage.labels import labels_of
from replay.storage.statements import selected
from replay.store import ReplayStore

_rows = schema.trajectories.c
_GREATEST = 2**62
"""A number beyond every staleness. Stalenesses can be negative: a resume may orphan rows of later policies."""

_SHOWN = (
    *(_rows[name] for name in ("id", "run", "iteration", "slot", "task", "environment", "source", "reward", "success")),
    *(_rows[name] for name in ("num_turns", "num_user_turns", "num_tool_calls", "num_tokens", "num_action_tokens")),
    *(_rows[name] for name in ("stop_reason", "error_kinds", "advantage", "state", "state_reason", "uses")),
    _rows.group.label("group_id"),
    NUM_TOOL_ERRORS.label("num_tool_errors"),
    DRIFT.label("drift"),
    TOKEN_GAP_MAX.label("token_gap_max"),
)


@dataclass(frozen=True)
class Patience:
    """The limits of a search in messages, which must read every conversation."""

    rows: int = 10_000
    seconds: float = 0.2


def page(
    store: ReplayStore,
    query: Query = Query(),  # noqa: B008  frozen
    *,
    limit: int = 50,
    after: str | None = None,
    before: str | None = None,
    patience: Patience = Patience(),
) -> QueryResult:
    """List at most `limit` rows that come `after` the row of that id, or `before` it.

    The answer's `after` and `before` lead to the pages around it. If filters ask about messages, `searched` counts the
    rows that were searched. `complete` is False if `patience` ended before the page was full; the search then continues
    at `after` (or `before`), and `left` counts the rows that it has yet to search.
    """
    backwards = before is not None
    rising = query.ascending is not backwards
    with store.reading() as connection:
        age = staleness(connection, query.run)
        parts = conditions(query.filters, known={"staleness": age})
        place = _sort_columns(query, age)
        statement = sa.select(_rows.id).where(parts.columns, run_is(query.run, _rows.run))
        start = before if backwards else after
        if start is not None:
            mine = sa.tuple_(*place)
            theirs = _sort_values_of(connection, place, start, "before" if backwards else "after")
            statement = statement.where(mine > theirs if rising else mine < theirs)
        statement = statement.order_by(*(column.asc() if rising else column.desc() for column in place))
        if parts.messages is None:
            ids = list(connection.scalars(statement.limit(limit + 1)))
            found = _Found(ids[:limit], ids[limit - 1] if len(ids) > limit else None)
        else:
            found = _search_messages(connection, statement, parts.messages, limit, patience)
        rows = _row_facts(connection, found.ids[::-1] if backwards else found.ids, age)
    back = found.ids[0] if found.ids and start is not None else None
    return {
        "rows": rows,
        "after": back if backwards else found.further,
        "before": found.further if backwards else back,
        "searched": found.searched,
        "complete": found.complete,
        "left": found.left,
    }


@dataclass(frozen=True)
class _Found:
    ids: list[str]
    further: str | None
    """The id of the row behind which the list continues. None: the list ends here."""
    searched: int | None = None
    complete: bool = True
    left: int = 0


def _sort_columns(query: Query, age: sa.ColumnElement[int]) -> list[sa.ColumnElement[Any]]:
    """Return the expressions that sort the rows. Unknown values become numbers that come last in the query's order."""
    sort, last = query.sort, 1 if query.ascending else -1
    run = [_rows.run] if query.run is None else []
    columns: list[sa.ColumnElement[Any]] = [_rows.iteration, _rows.slot, *run, _rows.id]
    if sort is Sort.iteration:
        return columns
    if sort is Sort.staleness:
        return [sa.func.coalesce(age, last * _GREATEST), *columns]
    field = FIELDS[sort]
    assert field.expression is not None
    if field.may_be_unknown:
        return [sa.func.coalesce(field.expression, sa.literal(last * sys.float_info.max, sa.Double)), *columns]
    return [field.expression, *columns]


def _sort_values_of(connection: sa.Connection, place: Sequence[sa.ColumnElement[Any]], id: str, name: str) -> sa.Tuple:
    """Return the values that a row is sorted by, even if the filters exclude the row."""
    found = connection.execute(sa.select(*place).where(_rows.id == id)).one_or_none()
    if found is None:
        raise ReplayError(f"{name} must be the id of a stored row, got {id[:80]!r}. Begin at the first page.")
    return sa.tuple_(*(sa.literal(value, column.type) for value, column in zip(found, place, strict=True)))


def _search_messages(
    connection: sa.Connection, statement: sa.Select[Any], says: sa.ColumnElement[bool], limit: int, patience: Patience
) -> _Found:
    """Find the first rows whose messages fit, until the time for searching is over."""
    candidates = list(connection.scalars(statement.limit(patience.rows)))
    ends = time.monotonic() + patience.seconds
    hits: list[str] = []
    searched = 0
    for chunk in chunked(candidates):
        fits = set(connection.scalars(sa.select(_rows.id).where(_rows.id.in_(chunk), says)))
        hits += [id for id in chunk if id in fits]
        searched += len(chunk)
        if len(hits) > limit or time.monotonic() > ends:
            break
    if len(hits) > limit:
        return _Found(hits[:limit], hits[limit - 1], searched)
    complete = searched == len(candidates) < patience.rows
    if complete:
        return _Found(hits, None, searched)
    rows = connection.scalar(sa.select(sa.func.count()).select_from(statement.order_by(None).subquery())) or 0
    return _Found(hits, candidates[searched - 1], searched, complete=False, left=rows - searched)


def _row_facts(connection: sa.Connection, ids: Sequence[str], age: sa.ColumnElement[int]) -> list[QueryResult]:
    columns = (*_SHOWN, age.label("staleness"))
    found = {row.id: dict(zip(row._fields, row, strict=True)) for row in selected(connection, columns, _rows.id, ids)}
    if lost := set(ids) - found.keys():
        raise DamagedDatabase(f"an index that leads to {min(lost)}, which is no row")
    said = excerpts_of(connection, ids)
    labels = labels_of(connection, ids)
    return [{**found[id], "labels": [each.label for each in labels.get(id, ())], **said.get(id, NONE)} for id in ids]


class SampledRow(NamedTuple):
    """A row's id, and the versions of the policies that sampled its oldest and its newest token."""

    id: str
    oldest_version: int
    newest_version: int


def sampled_rows(
    store: ReplayStore, run: str | None, filter: str | None, *, limit: int | None = None
) -> list[SampledRow]:
    """List rows whose stored log-probs can be computed again: they have tokens sampled at a temperature above 0."""
    columns = (_rows.id, _rows.policy_version_min, _rows.policy_version_max)
    wanted = (_rows.state.in_([ELIGIBLE, UNTRAINABLE, ORPHANED]), _rows.num_action_tokens > 0, _rows.temperature > 0)
    query = sa.select(*columns).where(chosen(run, filter), *wanted)
    with store.reading() as connection:
        found = connection.execute(query.order_by(_rows.run, _rows.iteration, _rows.slot, _rows.id).limit(limit))
        return [SampledRow(id, max(0, oldest), newest) for id, oldest, newest in found]


def run_labels_of(store: ReplayStore, run: str) -> list[QueryResult]:
    with store.reading() as connection:
        return [vars(label) for label in labels_of(connection, [run], "run").get(run, ())]
