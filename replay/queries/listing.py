"""Trajectories, a line each, a page at a time.

Pages are found by the last row of the one before (keyset paging): rows appended meanwhile move nothing, and the
thousandth page takes as long as the first.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from replay.errors import ReplayError
from replay.queries.excerpts import NONE, excerpts_of
from replay.queries.filters import SplitCondition, conditions
from replay.queries.filters.fields import DRIFT, DRIFT_MAX
from replay.queries.filters.query import Query, QueryResult, Sort, newest_versions, staleness
from replay.storage.format import schema
from replay.storage.format.rows import chunked
from replay.storage.statements import selected
from replay.store import ReplayStore

_rows = schema.trajectories.c

_LARGEST = sys.float_info.max

_LEAST, _GREATEST = -(2**62), 2**62
"""Before and behind every whole number there is; a row that a resume orphaned may be newer than its run's policy."""

_COLUMNS: dict[Sort, sa.ColumnElement[Any]] = {
    Sort.reward: _rows.reward,
    Sort.advantage: _rows.advantage,
    Sort.success: _rows.success,
    Sort.turns: _rows.num_turns,
    Sort.tools: _rows.num_tool_calls,
    Sort.tokens: _rows.num_tokens,
    Sort.uses: _rows.uses,
    Sort.stop_reason: _rows.stop_reason,
    Sort.source: _rows.source,
}
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
    """At most `limit` rows that come `after` a cursor of this query, or `before` it.

    `rows`, each with its `prompt` and last `answer` in few words (`queries.excerpts`); the cursors `after` and `before`
    of the pages next to this one, None where there is none. Where filters ask what was said: `searched`, how many rows
    were looked at, and `complete`: False where patience ended before the page was full; then `after` (or `before`) goes
    on from there. Raises ReplayError for a cursor of another query.
    """
    backwards = before is not None
    with store.reading() as connection:
        listing = _Listing(connection, query)
        place = listing.place(before if backwards else after, "before" if backwards else "after")
        found = listing.found(place, limit, backwards=backwards, patience=patience)
        rows = listing.read(found.ids[::-1] if backwards else found.ids)
    further = listing.cursor(found.end) if found.end is not None else None
    back = listing.cursor(found.begin) if found.begin is not None and place is not None else None
    return {
        "rows": rows,
        "after": back if backwards else further,
        "before": further if backwards else back,
        "searched": found.searched,
        "complete": found.complete,
    }


Place = tuple[Any, ...]
"""Where a row stands: what it is sorted by, then iteration, slot, run and id."""


@dataclass(frozen=True)
class _Found:
    ids: list[str]
    begin: Place | None
    """The place of the first row."""
    end: Place | None
    """What to go on from; None: there is nothing further."""
    searched: int | None = None
    complete: bool = True


class _Listing:
    """One query on one connection."""

    def __init__(self, connection: sa.Connection, query: Query) -> None:
        self._connection = connection
        self._query = query
        self._newest = newest_versions(connection, query.run)
        self._staleness = staleness(self._newest, query.run)
        self.parts: SplitCondition = conditions(query.filters, known={"staleness": self._staleness})
        self._names = [query.sort.value, str(query.ascending), query.run]
        columns = [_rows.iteration, _rows.slot, _rows.run, _rows.id]
        if query.run is not None:
            columns.remove(_rows.run)
        self.place_columns: list[sa.ColumnElement[Any]] = [*columns]
        if query.sort is Sort.staleness:
            unknown = _GREATEST if query.ascending else _LEAST
            self.place_columns.insert(0, sa.func.coalesce(self._staleness, unknown))
        elif query.sort in _DRIFTS:
            last = sa.literal(_LARGEST if query.ascending else -_LARGEST, sa.Double)
            self.place_columns.insert(0, sa.func.coalesce(_DRIFTS[query.sort], last))
        elif query.sort is not Sort.iteration:
            self.place_columns.insert(0, _COLUMNS[query.sort])

    def statement(self, place: Place | None, *, backwards: bool, whole: bool = False) -> sa.Select[Any]:
        """Ids in order, with their places if `whole`, of rows behind a place whose columns are as asked."""
        columns = self.place_columns
        statement = sa.select(_rows.id, *columns[:-1]) if whole else sa.select(_rows.id)
        statement = statement.where(self.parts.columns)
        if self._query.run is not None:
            statement = statement.where(_rows.run == self._query.run)
        rising = self._query.ascending is not backwards
        if place is not None:
            values = [sa.literal(value, column.type) for value, column in zip(place, columns, strict=True)]
            mine, theirs = sa.tuple_(*columns), sa.tuple_(*values)
            statement = statement.where(mine > theirs if rising else mine < theirs)
        return statement.order_by(*(column.asc() if rising else column.desc() for column in columns))

    def found(self, place: Place | None, limit: int, *, backwards: bool, patience: Patience) -> _Found:
        statement = self.statement(place, backwards=backwards, whole=True)
        if self.parts.messages is not None:
            return self._searched(statement, limit, patience)
        places = [_place(row) for row in self._connection.execute(statement.limit(limit + 1))]
        return _cut(places, limit)

    def _searched(self, statement: sa.Select[Any], limit: int, patience: Patience) -> _Found:
        """The first rows in order of which something was said, as far as patience reaches."""
        assert self.parts.messages is not None
        ends = time.monotonic() + patience.seconds
        candidates = [_place(row) for row in self._connection.execute(statement.limit(patience.rows))]
        hits: list[Place] = []
        searched = 0
        for chunk in chunked(candidates):
            ids = [place[-1] for place in chunk]
            matching = sa.select(_rows.id).where(_rows.id.in_(ids), self.parts.messages)
            fits = set(self._connection.scalars(matching))
            hits += [place for place in chunk if place[-1] in fits]
            searched += len(chunk)
            if len(hits) > limit or time.monotonic() > ends:
                break
        found = _cut(hits, limit)
        if found.end is not None or searched == len(candidates) < patience.rows:
            return _Found(found.ids, found.begin, found.end, searched)
        return _Found(found.ids, found.begin, candidates[searched - 1], searched, complete=False)

    def read(self, ids: Sequence[str]) -> list[QueryResult]:
        """Their lines, in this order."""
        columns = (*_SHOWN, self._staleness.label("staleness"))
        found = {row.id: dict(row._mapping) for row in selected(self._connection, columns, _rows.id, ids)}
        said = excerpts_of(self._connection, ids)
        return [{**found[id], **said.get(id, NONE)} for id in ids]

    def cursor(self, place: Place) -> str:
        text = json.dumps([*self._names, *self._turned(place)], separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    def _turned(self, place: Place) -> Place:
        """Staleness as the version of the row's oldest token, and back: each publish makes all of a run's rows staler,
        while people turn the pages."""
        if self._query.sort is not Sort.staleness or place[0] in (_LEAST, _GREATEST):
            return place
        run = place[3] if self._query.run is None else self._query.run
        return (self._newest[run] - place[0], *place[1:]) if run in self._newest else place

    def place(self, cursor: str | None, name: str) -> Place | None:
        if cursor is None:
            return None
        try:
            given = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
            place = tuple(given[len(self._names) :]) if isinstance(given, list) else ()
            if place and given[: len(self._names)] == self._names and _fits(place, self.place_columns):
                return self._turned(place)
        except (ValueError, TypeError, RecursionError):
            pass
        raise ReplayError(f"{name} must be a cursor of this list, got {cursor[:80]!r}. Begin at its first page.")


def _place(row: sa.Row[Any]) -> Place:
    """The id is read first and stands last."""
    return (*row[1:], row[0])


def _fits(place: Place, columns: Sequence[sa.ColumnElement[Any]]) -> bool:
    """Whether every value is one that its column could hold."""
    return len(place) == len(columns) and all(map(_is_value_of, place, columns))


def _is_value_of(value: Any, column: sa.ColumnElement[Any]) -> bool:
    kind = column.type.python_type
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float)) and abs(value) <= _LARGEST
    if kind is int:
        return isinstance(value, int) and abs(value) <= _GREATEST
    return isinstance(value, kind)


def _cut(places: list[Place], limit: int) -> _Found:
    """A page of the places, which are one more than there is room for if there are so many."""
    shown = places[:limit]
    more = len(places) > limit
    return _Found([place[-1] for place in shown], shown[0] if shown else None, shown[-1] if more and shown else None)
