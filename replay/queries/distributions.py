"""How the rows of a query are spread: bars to click on, and what there is to choose from."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

import sqlalchemy as sa

from replay.errors import DamagedDatabase
from replay.queries.filters import FIELDS, SplitCondition, conditions
from replay.queries.filters.fields import FieldKind
from replay.queries.filters.query import Query, QueryResult, newest_versions, staleness
from replay.queries.summary import buffer_staleness
from replay.storage.format import schema
from replay.storage.format.schema import groups
from replay.store import ReplayStore

_rows = schema.trajectories.c

SPREAD = ("reward", "tokens", "staleness", "uses", "group_success", "turns")
"""Fields that are shown as bars. `group_success` is how difficult a task was for the policy that collected the row."""
CHOICES = ("state", "source", "stop_reason")
"""Texts to choose from, besides the run."""

_BARS = 12
_VALUES = 5_000
"""Different values of a field that are counted one by one; of more, only bars are."""
_TEXTS = 200
"""Different combinations of texts to choose from; and runs."""

_ROWS = 200
"""Rows of a file that are handed over at once: too few for Python's garbage collector to begin, which looks at all that
a server holds."""

Counts = Counter[float | None]
"""Rows by value; None: unknown."""


@dataclass(frozen=True)
class ValueRange:
    """low <= value < high, or just the one value where both are the same."""

    low: Decimal
    high: Decimal

    def filter(self, field: str) -> str:
        low, high = _text(self.low), _text(self.high)
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
            return {"total": None, "fields": None, "choices": None, "staleness": None}
        counting = _Counting(connection, query.run, rows, age)
        fields = counting.fields(here=store.groups_by_sorting)
        total = fields["turns"]["unknown"] + sum(bar["count"] for bar in fields["turns"]["bars"])
        choices = counting.choices() | {"run": counting.runs(total)}
        stale = buffer_staleness(connection, age, counting.mine)
        return {"total": total, "fields": fields, "choices": choices, "staleness": stale}


class _Counting:
    """One query's rows on one connection."""

    def __init__(
        self, connection: sa.Connection, run: str | None, rows: SplitCondition, age: sa.ColumnElement[int]
    ) -> None:
        self._connection = connection
        self._run = run
        values = {
            "reward": _rows.reward,
            "tokens": _rows.num_tokens,
            "staleness": age,
            "uses": _rows.uses,
            "group_success": groups.c.success_rate,
            "turns": _rows.num_turns,
        }
        numbers = sa.select(*(sa.cast(values[name], sa.Double).label(name) for name in SPREAD))
        self.mine = rows.columns if run is None else sa.and_(_rows.run == run, rows.columns)
        collected = numbers.join_from(schema.trajectories, groups, groups.c.id == _rows.group, isouter=True)
        self._numbers = collected.where(self.mine)
        self._texts = sa.select(*(_rows[name] for name in CHOICES)).where(self.mine)

    def fields(self, *, here: bool) -> dict[str, QueryResult]:
        """`here`: rows are handed over and counted in Python; a server that counts well would have to send them all.

        Each row is looked at once; a field of too many values to count one by one is then counted in bars.
        """
        counts = self._counted_here() if here else self._counted_there()
        many = [name for name, values in counts.items() if len(values) > _VALUES]
        counted = self._counted_in_bars(many) if many else {}
        answers = {}
        for name, values in counts.items():
            if name not in counted:
                _refuse_nan(name, values)
                bars = bars_of([value for value in values if value is not None], whole=_is_whole(name))
                counted[name] = (values[None], counted_in_bars(values, bars))
            unknown, numbered = counted[name]
            answers[name] = {"unknown": unknown, "bars": [bar_answer(name, *each) for each in numbered.items()]}
        return answers

    def _counted_here(self) -> dict[str, Counts]:
        found = {name: Counts() for name in SPREAD}
        for rows in self._connection.execute(self._numbers).partitions(_ROWS):
            for counts, values in zip(found.values(), zip(*rows, strict=True), strict=True):
                if len(counts) <= _VALUES:
                    counts.update(values)
        return found

    def _counted_there(self) -> dict[str, Counts]:
        rows = self._numbers.cte("chosen")
        arms = []
        for name in SPREAD:
            arm = sa.select(rows.c[name].label("value"), sa.func.count().label("number")).group_by(rows.c[name])
            few = arm.limit(_VALUES + 1).subquery()
            arms.append(sa.select(sa.literal(name, sa.Text), few.c.value, few.c.number))
        found = {name: Counts() for name in SPREAD}
        for name, value, count in self._connection.execute(sa.union_all(*arms)):
            found[name][value] = count
        return found

    def _counted_in_bars(self, names: Sequence[str]) -> dict[str, tuple[int, dict[ValueRange, int]]]:
        """Unknown ones and bars, by field; two statements for any number of fields."""
        rows = self._numbers.cte("chosen")
        extents = [(sa.func.min(rows.c[name]), sa.func.max(rows.c[name]), sa.func.count()) for name in names]
        found = iter(self._connection.execute(sa.select(*(part for each in extents for part in each))).one())
        bars = {}
        totals = {}
        for name in names:
            extent = float(next(found)), float(next(found))
            _refuse_nan(name, extent)
            bars[name] = bars_of(extent, whole=_is_whole(name), few=0)
            totals[name] = next(found)
        inside = [
            sa.func.count().filter(rows.c[name] >= float(bar.low), rows.c[name] < float(bar.high))
            for name in names
            for bar in bars[name]
        ]
        numbers = iter(self._connection.execute(sa.select(*inside)).one())
        counted = {name: {bar: next(numbers) for bar in bars[name]} for name in names}
        return {name: (totals[name] - sum(counted[name].values()), counted[name]) for name in names}

    def choices(self) -> dict[str, dict[str, int]]:
        """What there is of each, and how often: to count by group would sort all rows once for each."""
        there = self._connection.execute(self._texts.distinct().limit(_TEXTS)).all()
        pairs = [(name, text) for at, name in enumerate(CHOICES) for text in sorted({row[at] for row in there})]
        if not pairs:
            return {name: {} for name in CHOICES}
        rows = self._texts.subquery()
        counted = sa.select(*(sa.func.count().filter(rows.c[name] == text) for name, text in pairs))
        numbers = zip(pairs, self._connection.execute(counted).one(), strict=True)
        ordered = sorted(numbers, key=lambda each: -each[1])
        return {name: {text: count for (of, text), count in ordered if of == name} for name in CHOICES}

    def runs(self, total: int) -> dict[str, int]:
        """As choices; rows stand by their run in an index."""
        if self._run is not None:
            return {self._run: total} if total else {}
        number = sa.func.count().label("number")
        query = sa.select(_rows.run, number).where(self.mine).group_by(_rows.run)
        found = self._connection.execute(query.order_by(sa.desc("number"), _rows.run).limit(_TEXTS))
        return {row.run: row.number for row in found}


def _is_whole(name: str) -> bool:
    return FIELDS[name].kind is FieldKind.whole


def _refuse_nan(name: str, values: Iterable[float | None]) -> None:
    if any(value is not None and math.isnan(value) for value in values):
        raise DamagedDatabase(f"nan in {name}")


def counted_in_bars(values: Counts, bars: Sequence[ValueRange]) -> dict[ValueRange, int]:
    """Known ones, each of which is in one of the bars."""
    lows = [float(bar.low) for bar in bars]
    found = dict.fromkeys(bars, 0)
    for value, count in values.items():
        if value is not None:
            found[bars[bisect_right(lows, value) - 1]] += count
    return found


def bars_of(values: Sequence[float], *, whole: bool, few: int = _BARS) -> list[ValueRange]:
    """One bar for each of a few values; else bars of the same round width, next to each other, that hold them all."""
    if not values:
        return []
    if len(values) <= few:
        exact = sorted(Decimal(repr(value)) for value in values)
        return [ValueRange(value, value) for value in exact]
    low, high = Decimal(repr(min(values))), Decimal(repr(max(values)))
    width = _round_width((high - low) / _BARS, whole=whole)
    first, last = (low / width).to_integral_value("ROUND_FLOOR"), (high / width).to_integral_value("ROUND_FLOOR")
    edges = [_edge(Decimal(at) * width) for at in range(int(first), int(last) + 2)]
    if float(edges[-1]) <= float(high):
        # Of values a few units in the last place apart, the greatest is what its edge is rounded to.
        edges[-1] += width
    return [ValueRange(low, high) for low, high in pairwise(edges)]


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


def bar_answer(name: str, bar: ValueRange, count: int) -> QueryResult:
    return {"low": _number(bar.low), "high": _number(bar.high), "count": count, "filter": bar.filter(name)}


def _number(value: Decimal) -> float | int:
    """JSON has no infinity: the largest number stands for it."""
    if not math.isfinite(value):
        return math.copysign(sys.float_info.max, value)
    return int(value) if value == value.to_integral_value() and abs(value) < 2**53 else float(value)


def _text(value: Decimal) -> str:
    """As a filter writes it."""
    return repr(_number(value))
