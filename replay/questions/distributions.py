"""How the rows of a query are spread: bars to click on, and what there is to choose from."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.questions.filters import FIELDS, conditions
from replay.questions.filters.fields import FieldKind
from replay.questions.filters.query import Query, QueryResult, newest_versions, run_is, staleness
from replay.questions.summary import buffer_staleness
from replay.storage.format import schema
from replay.storage.format.schema import groups
from replay.store import ReplayStore

_rows = schema.trajectories.c

SPREAD = ("reward", "tokens", "staleness", "uses", "group_success", "turns")
"""Fields that are shown as bars. `group_success` is how difficult a task was for the policy that collected the row."""
CHOICES = ("state", "source", "stop_reason", "run")
"""Texts to choose from."""
_BARS = 12
_KINDS = 200
"""Combinations of these texts that are counted, the most frequent ones."""
_FETCHED = 200
"""Rows that are fetched at once: too few for Python's garbage collector to begin, which looks at all that a server
holds."""


@dataclass(frozen=True)
class ValueRange:
    """low <= value < high, or just the one value where both are the same."""

    low: Decimal
    high: Decimal

    def filter(self, field: str) -> str:
        low, high = (repr(_number(edge)) for edge in (self.low, self.high))
        if self.low == self.high:
            return f"{field} == {low}"
        if math.isinf(self.low):
            return f"{field} < {high}"
        return f"{low} <= {field}" + (f" < {high}" if math.isfinite(self.high) else "")


def distributions(store: ReplayStore, query: Query) -> QueryResult:
    """The values of all rows a query is about, whatever its order.

    `total`; `fields`, each with the count of `unknown` and `bars` (`low`, `high`, `count` and the `filter` that chooses
    them; where low equals high the bar is that one value); `choices` with counts, the most frequent first; `staleness`
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
            "fields": {name: _field(name, column) for name, column in zip(SPREAD, values.T, strict=True)},
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
    return np.concatenate([np.empty((0, len(SPREAD))), *found])


def _field(name: str, values: npt.NDArray[np.float64]) -> QueryResult:
    """The bars of a field, and how many values are unknown."""
    known, counts = np.unique(values[np.isfinite(values)], return_counts=True)
    bars = bars_of(known.tolist(), whole=FIELDS[name].kind is FieldKind.whole)
    places = np.searchsorted([float(bar.low) for bar in bars], known, side="right") - 1
    inside = np.bincount(places, counts, len(bars)).astype(int).tolist() if bars else []
    shown = [
        {"low": _number(bar.low), "high": _number(bar.high), "count": count, "filter": bar.filter(name)}
        for bar, count in zip(bars, inside, strict=True)
    ]
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


def bars_of(values: Sequence[float], *, whole: bool, few: int = _BARS) -> list[ValueRange]:
    """One bar for each of a few values; else bars of the same round width, next to each other, that hold them all.

    `values` are different and ascending.
    """
    if len(values) <= few:
        return [ValueRange(value, value) for value in map(_decimal, values)]
    low, high = _decimal(values[0]), _decimal(values[-1])
    width = _round_width((high - low) / _BARS, whole=whole)
    first, last = (low / width).to_integral_value("ROUND_FLOOR"), (high / width).to_integral_value("ROUND_FLOOR")
    edges = [_edge(Decimal(at) * width) for at in range(int(first), int(last) + 2)]
    if float(edges[-1]) <= float(high):
        # Of values a few units in the last place apart, the greatest is what its edge is rounded to.
        edges[-1] += width
    return [ValueRange(low, high) for low, high in pairwise(edges)]


def _decimal(value: float) -> Decimal:
    return Decimal(repr(value))


def _edge(value: Decimal) -> Decimal:
    """Beyond the largest numbers there is no other edge than infinity."""
    return value if math.isfinite(float(value)) else Decimal("inf").copy_sign(value)


def _round_width(least: Decimal, *, whole: bool) -> Decimal:
    """1, 2 or 5 times a power of ten; of whole numbers at least 1."""
    if least <= 0:
        return Decimal(1)
    power = Decimal(10) ** math.floor(least.log10())
    width = next(power * times for times in (1, 2, 5, 10) if power * times >= least)
    return max(width, Decimal(1)) if whole else width


def _number(value: Decimal) -> Any:
    """JSON has no infinity: the largest number stands for it."""
    if not math.isfinite(value):
        return math.copysign(sys.float_info.max, value)
    return int(value) if value == value.to_integral_value() and abs(value) < 2**53 else float(value)
