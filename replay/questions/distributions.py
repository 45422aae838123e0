"""How the rows of a query are spread: bars to click on, and what there is to choose from."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.questions.filters import FIELDS, FieldKind, conditions
from replay.questions.filters.query import Query, QueryResult, newest_versions, run_is, staleness
from replay.questions.summary import buffer_staleness
from replay.storage.format import schema
from replay.storage.format.schema import groups
from replay.store import ReplayStore

_rows = schema.trajectories.c

FIELDS_SHOWN = ("reward", "tokens", "staleness", "uses", "group_success", "turns")
"""Fields that are shown as bars. `group_success` is how difficult a task was for the policy that collected the row."""
CHOICES = ("state", "source", "stop_reason", "run")
"""Texts to choose from."""
_BARS = 12
_KINDS = 200
"""Combinations of these texts that are counted, the most frequent ones."""
_FETCHED = 200
"""Rows that are fetched at once: too few for Python's garbage collector to begin, which looks at all a server holds."""


def distributions(store: ReplayStore, query: Query) -> QueryResult:
    """The values of all rows a query is about, whatever its order.

    `total`; `fields`, each with the count of `unknown` and `bars` (see `bars_of`); `choices` with counts; `staleness`
    of those that can be drawn. All None where filters ask what was said: counting would read every conversation.
    """
    with store.reading() as connection:
        age = staleness(newest_versions(connection, query.run), query.run)
        rows = conditions(query.filters, known={"staleness": age})
        if rows.messages is not None:
            return dict.fromkeys(("total", "fields", "choices", "staleness"))
        mine = sa.and_(run_is(query.run, _rows.run), rows.columns)
        values = _values(connection, mine, age)
        return {
            "total": len(values),
            "fields": {name: _field(name, column) for name, column in zip(FIELDS_SHOWN, values.T, strict=True)},
            "choices": _choices(connection, mine),
            "staleness": buffer_staleness(connection, age, mine),
        }


def _values(
    connection: sa.Connection, mine: sa.ColumnElement[bool], age: sa.ColumnElement[int]
) -> npt.NDArray[np.float64]:
    """[rows, fields]; NaN where a value is unknown."""
    columns = (_rows.reward, _rows.num_tokens, age, _rows.uses, groups.c.success_rate, _rows.num_turns)
    query = sa.select(*(sa.cast(column, sa.Double) for column in columns)).where(mine)
    joined = query.join_from(schema.trajectories, groups, groups.c.id == _rows.group, isouter=True)
    found = [np.array(rows, np.float64) for rows in connection.execute(joined).partitions(_FETCHED)]
    return np.concatenate([np.empty((0, len(FIELDS_SHOWN))), *found])


def _field(name: str, values: npt.NDArray[np.float64]) -> QueryResult:
    """The bars of a field, and how many values are unknown."""
    known, counts = np.unique(values[np.isfinite(values)], return_counts=True)
    bars = bars_of(name, known.tolist())
    places = np.searchsorted([bar["low"] for bar in bars[1:]], known, side="right")
    inside = np.bincount(places, counts, len(bars)).astype(int).tolist()
    shown = [{**bar, "count": count} for bar, count in zip(bars, inside, strict=True)]
    return {"unknown": len(values) - int(counts.sum()), "bars": shown}


def _choices(connection: sa.Connection, mine: sa.ColumnElement[bool]) -> dict[str, dict[str, int]]:
    """The count of each text there is, the most frequent first."""
    # The more telling column first: SQLite sorts the rows, and looks further where they are equal.
    kind, number = [_rows[name] for name in reversed(CHOICES)], sa.func.count().label("number")
    query = sa.select(*kind, number).where(mine).group_by(*kind).order_by(sa.desc("number"), *kind).limit(_KINDS)
    found: dict[str, dict[str, int]] = {name: {} for name in CHOICES}
    for row in connection.execute(query).mappings():
        for name, counts in found.items():
            counts[row[name]] = counts.get(row[name], 0) + row["number"]
    return {name: dict(sorted(counts.items(), key=lambda each: -each[1])) for name, counts in found.items()}


def bars_of(field: str, values: Sequence[float]) -> list[QueryResult]:
    """`low`, `high` and `filter` of one bar for each of a few values; else of bars of one round width, side by side.

    `values` are different and ascending. A bar holds what is at least `low` and below `high`; the first and the last
    one also what rounding has put beyond them.
    """
    if len(values) <= _BARS:
        numbers = map(_number, values)
        return [{"low": value, "high": value, "filter": f"{field} == {value!r}"} for value in numbers]
    low, high = Decimal(repr(values[0])), Decimal(repr(values[-1]))
    width = _round_width((high - low) / _BARS, whole=FIELDS[field].kind is FieldKind.whole)
    first, last = (int((edge / width).to_integral_value("ROUND_FLOOR")) for edge in (low, high))
    edges = [_number(float(at * width)) for at in range(first, last + 2)]
    bars = [{"low": a, "high": b, "filter": f"{a!r} <= {field} < {b!r}"} for a, b in pairwise(edges)]
    bars[0]["filter"], bars[-1]["filter"] = f"{field} < {edges[1]!r}", f"{edges[-2]!r} <= {field}"
    return bars


def _round_width(least: Decimal, *, whole: bool) -> Decimal:
    """1, 2 or 5 times a power of ten; of whole numbers at least 1."""
    power = Decimal(10) ** math.floor(least.log10())
    width = next(power * times for times in (1, 2, 5, 10) if power * times >= least)
    return max(width, Decimal(1)) if whole else width


def _number(value: float) -> float:
    """JSON has no infinity: the largest number stands for it. Whole numbers are shown as such."""
    value = min(max(value, -sys.float_info.max), sys.float_info.max)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
