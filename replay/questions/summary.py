"""The buffer in numbers; and how the rows of a query are spread: bars to click on, and what there is to choose from."""

import math
import sys
from collections.abc import Collection, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.questions.filters import FIELDS, FieldKind, condition, conditions
from replay.questions.filters.query import Query, QueryResult, chosen, run_is, staleness
from replay.records import COMMITTED, ELIGIBLE, REPLAY, RESERVED, STATES
from replay.storage.format import schema
from replay.storage.format.schema import draws, groups, policies, reclaimed, runs
from replay.storage.format.views import WITHOUT_SIGNAL
from replay.store import ReplayStore

_rows = schema.trajectories.c


def total(column: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """PostgreSQL makes sums and means of whole numbers decimals, which are no JSON."""
    return sa.cast(sa.func.coalesce(sa.func.sum(column), 0), sa.BigInteger)


def mean(column: sa.Column[Any]) -> sa.Function[float]:
    return sa.func.avg(sa.cast(column, sa.Double), type_=sa.Double)


_SUMS = {
    "trajectories": sa.func.count(),
    "tokens": total(_rows.num_tokens),
    "action_tokens": total(_rows.num_action_tokens),
    "successes": total(sa.cast(_rows.success, sa.Integer)),
    "reward": sa.func.sum(_rows.reward),
    "turns": total(_rows.num_turns),
}


def summary(store: ReplayStore, run: str | None = None, *, filter: str | None = None) -> QueryResult:
    """The buffer in numbers, over every stored row of a run (None: of all) and by state and source.

    `filter`: over the rows it holds for (`replay.questions.filters`), their groups, tasks and draws. Rows that were
    `reclaimed`, of which a few numbers are left, are counted apart, whatever the filter.
    """
    rows = chosen(run, filter)
    with store.reading() as connection:
        kinds = _kinds(connection, rows)
        age = staleness(connection, run)
        return {
            "database": store.url,
            "bytes": store.size(connection),
            "runs": _count(connection, run, runs.c.id),
            "iterations": _count(connection, run, schema.iterations.c.run),
            "policies": _count(connection, run, policies.c.run),
            **_groups(connection, run, filter),
            **_totals(kinds.values()),
            "states": _by_part(kinds, 0, STATES),
            "sources": _by_part(kinds, 2, sorted({source for *_, source in kinds})),
            "reclaimed": _reclaimed(connection, run),
            "stop_reasons": _stop_reasons(kinds),
            "staleness": buffer_staleness(connection, age, rows),
            "draws": _draws(connection, run, filter),
        }


def buffer_staleness(
    connection: sa.Connection, age: sa.ColumnElement[int], rows: sa.ColumnElement[bool]
) -> QueryResult:
    """Mean and largest staleness `age` of the rows that can be drawn, and of how many it is `known`."""
    known = sa.select(
        sa.func.avg(sa.cast(age, sa.Double)).label("mean"),
        sa.cast(sa.func.max(age), sa.BigInteger).label("max"),
        sa.func.count(age).label("known"),
    )
    return dict(connection.execute(known.where(rows, _rows.state == ELIGIBLE)).mappings().one())


def _reclaimed(connection: sa.Connection, run: str | None) -> int:
    """Rows that were evicted for good, and so are none of those that a filter asks."""
    query = sa.select(sa.func.count()).select_from(reclaimed)
    if run is not None:
        query = query.join(groups, groups.c.id == reclaimed.c.group).where(groups.c.run == run)
    return connection.scalar(query) or 0


_GROUP_COUNTS = (
    sa.func.count(sa.distinct(groups.c.task)).label("tasks"),
    sa.func.count(groups.c.id).label("groups"),
    total(sa.cast(WITHOUT_SIGNAL, sa.Integer)).label("groups_without_signal"),
)


def _groups(connection: sa.Connection, run: str | None, filter: str | None) -> QueryResult:
    query = sa.select(*_GROUP_COUNTS).where(run_is(run, groups.c.run))
    if filter is not None:
        query = query.where(groups.c.id.in_(sa.select(_rows.group).where(chosen(run, filter))))
    return dict(connection.execute(query).mappings().one())


_Kinds = dict[tuple[str, str, str], QueryResult]
"""Sums by state, stop reason and source, from which follows all that is said of the rows: they are looked at once."""


def _kinds(connection: sa.Connection, rows: sa.ColumnElement[bool]) -> _Kinds:
    sums = (value.label(name) for name, value in _SUMS.items())
    # The more telling one first: rows are sorted for it by SQLite, which looks further where they are equal.
    kind = (_rows.stop_reason, _rows.state, _rows.source)
    query = sa.select(*kind, *sums).where(rows).group_by(*kind)
    found = map(dict, connection.execute(query).mappings())
    return {(row.pop("state"), row.pop("stop_reason"), row.pop("source")): row for row in found}


def _totals(sums: Collection[QueryResult]) -> QueryResult:
    found: QueryResult = {name: sum(each[name] for each in sums) for name in _SUMS}
    reward, turns, count = found.pop("reward"), found.pop("turns"), found["trajectories"]
    means = (reward / count, turns / count) if count else (None, None)
    return {**found, "reward_mean": means[0], "turns_mean": means[1]}


def _by_part(kinds: _Kinds, part: int, order: Sequence[str]) -> QueryResult:
    """The totals of each state, or of each source: the part of the key that is asked."""
    there = {key[part] for key in kinds}
    totals = {name: [sums for key, sums in kinds.items() if key[part] == name] for name in order if name in there}
    return {name: _totals(sums) for name, sums in totals.items()}


def _stop_reasons(kinds: _Kinds) -> dict[str, int]:
    counts: dict[str, int] = {}
    for (_, reason, _), sums in sorted(kinds.items(), key=lambda item: item[0][1]):
        counts[reason] = counts.get(reason, 0) + sums["trajectories"]
    return counts


def _draws(connection: sa.Connection, run: str | None, filter: str | None) -> QueryResult:
    """Rows that fed updates, by stream, and how old the replayed ones were."""
    mine = run_is(run, draws.c.run)
    if filter is not None:
        mine = mine & draws.c.trajectory.in_(sa.select(_rows.id).where(condition(filter)))
    committed = draws.c.state == COMMITTED
    # Most draws are fresh and committed: no sum looks at them, and an index alone counts all there are.
    others = sa.select(
        sa.func.count().label("others"),
        sa.func.count().filter(committed).label("replay"),
        sa.func.count().filter(draws.c.state == RESERVED).label("reserved"),
        sa.func.count(sa.distinct(draws.c.trajectory)).filter(committed).label("trajectories_replayed"),
        mean(draws.c.staleness).filter(committed).label("staleness_mean"),
        sa.func.max(draws.c.staleness).filter(committed).label("staleness_max"),
        mean(draws.c.drift_mean).filter(committed).label("drift_mean"),
        sa.func.max(draws.c.token_gap_max).filter(committed).label("token_gap_max"),
    ).where(mine, sa.or_(draws.c.stream == REPLAY, draws.c.state == RESERVED))
    found = dict(connection.execute(others).mappings().one())
    all_draws = connection.scalar(sa.select(sa.func.count()).select_from(draws).where(mine)) or 0
    return {"fresh": all_draws - found.pop("others"), **found}


def _count(connection: sa.Connection, run: str | None, owner: sa.Column[str]) -> int:
    return connection.scalar(sa.select(sa.func.count(owner)).where(run_is(run, owner))) or 0


FIELDS_SHOWN = ("reward", "num_tokens", "staleness", "uses", "group_success", "num_turns")
"""Fields that are shown as bars. `group_success` is how difficult a task was for the policy that collected the row."""
CHOICES = ("state", "source", "stop_reason", "run")
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
        age = staleness(connection, query.run)
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
    # By columns: NumPy reads plain tuples several times as fast as rows.
    parts = connection.execute(joined).partitions(_FETCHED)
    found = [np.array([*zip(*rows, strict=True)], np.float64) for rows in parts]
    return np.concatenate([np.empty((len(FIELDS_SHOWN), 0)), *found], axis=1).T


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
