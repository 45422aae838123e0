"""Trajectories, a line each, a page at a time.

Pages are found by the last row of the one before (keyset paging): rows appended meanwhile move nothing, and the
thousandth page takes as long as the first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from replay.errors import ReplayError
from replay.questions.filters import SplitCondition, conditions
from replay.questions.filters.fields import DRIFT, DRIFT_MAX
from replay.questions.filters.query import Query, QueryResult, Sort, newest_versions, run_is, staleness
from replay.questions.trajectory import NONE, excerpts_of
from replay.storage.format import schema
from replay.storage.format.rows import chunked
from replay.storage.statements import selected
from replay.store import ReplayStore

_rows = schema.trajectories.c
_GREATEST = 2**62
"""Beyond every staleness, as its negative is; a row that a resume orphaned may be newer than its run's policy."""

_COUNTED = {Sort.turns: "num_turns", Sort.tools: "num_tool_calls", Sort.tokens: "num_tokens"}
_SHOWN = (
    *(_rows[name] for name in ("id", "run", "iteration", "slot", "task", "environment", "source", "reward", "success")),
    *(_rows[name] for name in ("num_turns", "num_tool_calls", "num_tokens", "num_action_tokens")),
    *(_rows[name] for name in ("stop_reason", "error_kind", "advantage", "state", "state_reason", "uses")),
    _rows.group.label("group"),
    DRIFT.label("drift"),
    DRIFT_MAX.label("drift_max"),
)
_DRIFTS = {Sort.drift: DRIFT, Sort.drift_max: DRIFT_MAX}


@dataclass(frozen=True)
class Patience:
    """How long to look for what was said: every conversation must be read."""

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
    """At most `limit` rows that come `after` the row of that id, or `before` it, and where the pages beside it begin.

    Where filters ask what was said: `searched`, how many rows were looked at, and `complete`: False where patience
    ended before the page was full; then `after` (or `before`) goes on from there.
    """
    backwards = before is not None
    with store.reading() as connection:
        listing = _Listing(connection, query)
        start = before if backwards else after
        place = None if start is None else listing.place(start, "before" if backwards else "after")
        found = listing.found(place, limit, backwards=backwards, patience=patience)
        rows = listing.read(found.ids[::-1] if backwards else found.ids)
    back = found.ids[0] if found.ids and place is not None else None
    return {
        "rows": rows,
        "after": back if backwards else found.further,
        "before": found.further if backwards else back,
        "searched": found.searched,
        "complete": found.complete,
    }


Place = Sequence[Any]
"""What a row is sorted by, then iteration, slot, run and id."""


@dataclass(frozen=True)
class _Found:
    ids: list[str]
    further: str | None
    """The id of the row to go on from; None: there is nothing further."""
    searched: int | None = None
    complete: bool = True


class _Listing:
    """One query on one connection."""

    def __init__(self, connection: sa.Connection, query: Query) -> None:
        self._connection = connection
        self._query = query
        self._staleness = staleness(newest_versions(connection, query.run), query.run)
        self._parts: SplitCondition = conditions(query.filters, known={"staleness": self._staleness})
        columns: list[sa.ColumnElement[Any]] = [_rows.iteration, _rows.slot, _rows.run, _rows.id]
        if query.run is not None:
            columns.remove(_rows.run)
        sort, last = query.sort, 1 if query.ascending else -1
        if sort is Sort.staleness:
            columns.insert(0, sa.func.coalesce(self._staleness, last * _GREATEST))
        elif sort in _DRIFTS:
            columns.insert(0, sa.func.coalesce(_DRIFTS[sort], sa.literal(last * sys.float_info.max, sa.Double)))
        elif sort is not Sort.iteration:
            columns.insert(0, _rows[_COUNTED.get(sort, sort.value)])
        self._place = columns

    def place(self, id: str, name: str) -> Place:
        """Where a row stands in the list, also one that the filters leave out."""
        found = self._connection.execute(sa.select(*self._place).where(_rows.id == id)).one_or_none()
        if found is None:
            raise ReplayError(f"{name} must be the id of a stored row, got {id[:80]!r}. Begin at the first page.")
        return found

    def _statement(self, place: Place | None, *, backwards: bool) -> sa.Select[Any]:
        """Ids in order, of rows behind a place."""
        statement = sa.select(_rows.id).where(self._parts.columns, run_is(self._query.run, _rows.run))
        rising = self._query.ascending is not backwards
        if place is not None:
            values = [sa.literal(value, column.type) for value, column in zip(place, self._place, strict=True)]
            mine, theirs = sa.tuple_(*self._place), sa.tuple_(*values)
            statement = statement.where(mine > theirs if rising else mine < theirs)
        return statement.order_by(*(column.asc() if rising else column.desc() for column in self._place))

    def found(self, place: Place | None, limit: int, *, backwards: bool, patience: Patience) -> _Found:
        statement = self._statement(place, backwards=backwards)
        if self._parts.messages is not None:
            return self._searched(statement, limit, patience)
        ids = list(self._connection.scalars(statement.limit(limit + 1)))
        return _Found(ids[:limit], ids[limit - 1] if len(ids) > limit else None)

    def _searched(self, statement: sa.Select[Any], limit: int, patience: Patience) -> _Found:
        """The first rows in order of which something was said, as far as patience reaches."""
        assert self._parts.messages is not None
        ends = time.monotonic() + patience.seconds
        candidates = list(self._connection.scalars(statement.limit(patience.rows)))
        hits: list[str] = []
        searched = 0
        for chunk in chunked(candidates):
            matching = sa.select(_rows.id).where(_rows.id.in_(chunk), self._parts.messages)
            fits = set(self._connection.scalars(matching))
            hits += [id for id in chunk if id in fits]
            searched += len(chunk)
            if len(hits) > limit or time.monotonic() > ends:
                break
        if len(hits) > limit:
            return _Found(hits[:limit], hits[limit - 1], searched)
        complete = searched == len(candidates) < patience.rows
        return _Found(hits, None if complete else candidates[searched - 1], searched, complete=complete)

    def read(self, ids: Sequence[str]) -> list[QueryResult]:
        """Their lines, in this order."""
        columns = (*_SHOWN, self._staleness.label("staleness"))
        found = {row.id: dict(row._mapping) for row in selected(self._connection, columns, _rows.id, ids)}
        said = excerpts_of(self._connection, ids)
        return [{**found[id], **said.get(id, NONE)} for id in ids]
