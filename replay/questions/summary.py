"""A summary of the buffer in numbers, and the distributions of a query's rows as bars and counted choices."""

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
from replay.records import COMMITTED, ELIGIBLE, HINDSIGHT, ORPHANED, REPLAY, RESERVED, STATES
from replay.storage.format import schema
from replay.storage.format.schema import draws, groups, policies, reclaimed, runs
from replay.storage.format.views import COUNTS_AS_ATTEMPTS, WITHOUT_SIGNAL
from replay.store import ReplayStore

_rows = schema.trajectories.c


def total(column: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """Return the sum of a column as a whole number. PostgreSQL would make it a decimal, which is not JSON."""
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
    """Summarise the stored rows of a run (None: of all), in total, by state and by source.

    `successes`, `reward_mean`, `turns_mean` and `stop_reasons` are of the `episodes`. These, groups and tasks leave out
    hindsight and what a resume undid. A `filter` restricts the summary to the rows it holds for, with their groups,
    tasks and draws, but not `reclaimed`: the number of evicted rows, of which only a few numbers are left.
    """
    rows = chosen(run, filter)
    with store.reading() as connection:
        kinds = _sums_by_kind(connection, rows)
        episodes = {key: sums for key, sums in kinds.items() if key[0] != ORPHANED and key[2] != HINDSIGHT}
        of_episodes = _totals(episodes.values())
        age = staleness(connection, run)
        return {
            "database": store.url,
            "bytes": store.size(connection),
            "runs": _count(connection, run, runs.c.id),
            "iterations": _count(connection, run, schema.iterations.c.run),
            "policies": _count(connection, run, policies.c.run),
            **_groups(connection, run, filter),
            **_totals(kinds.values()),
            "episodes": of_episodes["trajectories"],
            **{name: of_episodes[name] for name in ("successes", "reward_mean", "turns_mean")},
            "states": _totals_by_part(kinds, 0, STATES),
            "sources": _totals_by_part(kinds, 2, sorted({source for *_, source in kinds})),
            "reclaimed": _reclaimed(connection, run),
            "stop_reasons": _stop_reasons(episodes),
            "staleness": buffer_staleness(connection, age, rows),
            "draws": _draws(connection, run, filter),
        }


def buffer_staleness(
    connection: sa.Connection, age: sa.ColumnElement[int], rows: sa.ColumnElement[bool]
) -> QueryResult:
    """Return the mean and the largest staleness of the rows that can be drawn, and for how many it is `known`."""
    known = sa.select(
        sa.func.avg(sa.cast(age, sa.Double)).label("mean"),
        sa.cast(sa.func.max(age), sa.BigInteger).label("max"),
        sa.func.count(age).label("known"),
    )
    return dict(connection.execute(known.where(rows, _rows.state == ELIGIBLE)).mappings().one())


def _reclaimed(connection: sa.Connection, run: str | None) -> int:
    """Count the evicted rows, which filters can't ask about."""
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
    query = sa.select(*_GROUP_COUNTS).where(run_is(run, groups.c.run), COUNTS_AS_ATTEMPTS)
    if filter is not None:
        query = query.where(groups.c.id.in_(sa.select(_rows.group).where(chosen(run, filter))))
    return dict(connection.execute(query).mappings().one())


_Kinds = dict[tuple[str, str, str], QueryResult]
"""Sums by state, stop reason and source. One query reads them, and all other sums follow from them."""


def _sums_by_kind(connection: sa.Connection, rows: sa.ColumnElement[bool]) -> _Kinds:
    sums = (value.label(name) for name, value in _SUMS.items())
    # The column with the most values comes first, which makes SQLite's sort faster.
    kind = (_rows.stop_reason, _rows.state, _rows.source)
    query = sa.select(*kind, *sums).where(rows).group_by(*kind)
    found = map(dict, connection.execute(query).mappings())
    return {(row.pop("state"), row.pop("stop_reason"), row.pop("source")): row for row in found}


def _totals(sums: Collection[QueryResult]) -> QueryResult:
    found: QueryResult = {name: sum(each[name] for each in sums) for name in _SUMS}
    reward, turns, count = found.pop("reward"), found.pop("turns"), found["trajectories"]
    means = (reward / count, turns / count) if count else (None, None)
    return {**found, "reward_mean": means[0], "turns_mean": means[1]}


def _totals_by_part(kinds: _Kinds, part: int, order: Sequence[str]) -> QueryResult:
    """Return the totals by one part of the key, such as the state or the source."""
    there = {key[part] for key in kinds}
    totals = {name: [sums for key, sums in kinds.items() if key[part] == name] for name in order if name in there}
    return {name: _totals(sums) for name, sums in totals.items()}


def _stop_reasons(kinds: _Kinds) -> dict[str, int]:
    counts: dict[str, int] = {}
    for (_, reason, _), sums in sorted(kinds.items(), key=lambda item: item[0][1]):
        counts[reason] = counts.get(reason, 0) + sums["trajectories"]
    return counts


def _draws(connection: sa.Connection, run: str | None, filter: str | None) -> QueryResult:
    """Count the draws that updates used, by stream, and describe the replayed ones."""
    mine = run_is(run, draws.c.run)
    if filter is not None:
        mine = mine & draws.c.trajectory.in_(sa.select(_rows.id).where(condition(filter)))
    committed = draws.c.state == COMMITTED
    # Most draws are fresh and committed. They follow from the count of all draws, which an index answers.
    others = sa.select(
        sa.func.count().label("others"),
        sa.func.count().filter(committed).label("replay"),
        sa.func.count().filter(draws.c.state == RESERVED).label("reserved"),
        sa.func.count(sa.distinct(draws.c.trajectory)).filter(committed).label("trajectories_replayed"),
        mean(draws.c.staleness).filter(committed).label("staleness_mean"),
        sa.func.max(draws.c.staleness).filter(committed).label("staleness_max"),
        mean(draws.c.drift_mean).filter(committed).label("row_drift_mean"),
        sa.func.max(draws.c.token_gap_max).filter(committed).label("token_gap_max"),
    ).where(mine, sa.or_(draws.c.stream == REPLAY, draws.c.state == RESERVED))
    found = dict(connection.execute(others).mappings().one())
    all_draws = connection.scalar(sa.select(sa.func.count()).select_from(draws).where(mine)) or 0
    return {"fresh": all_draws - found.pop("others"), **found}


def _count(connection: sa.Connection, run: str | None, owner: sa.Column[str]) -> int:
    return connection.scalar(sa.select(sa.func.count(owner)).where(run_is(run, owner))) or 0


FIELDS_SHOWN = ("reward", "num_tokens", "staleness", "uses", "group_success", "num_turns")
"""Fields that are shown as bars. `group_success` tells how hard the task was for the policy that collected the row."""
CHOICES = ("state", "source", "stop_reason", "run")
_BARS = 12
_KINDS = 200
"""Most combinations of CHOICES that are counted. The most frequent ones are."""
_FETCHED = 200
"""Rows that are fetched at once. More would start Python's garbage collector, which is slow in a server."""


def read_numbers(connection: sa.Connection, *queries: sa.Select[Any]) -> npt.NDArray[np.float64]:
    """Read the rows of queries for the same columns, as an array [columns, rows]. NaN: the value is unknown."""
    found = [np.empty((len(queries[0].selected_columns), 0))]
    for query in queries:
        plain = query.with_only_columns(*(sa.cast(column, sa.Double) for column in query.selected_columns))
        # Arrays are made of columns, because NumPy reads plain tuples several times as fast as database rows.
        parts = connection.execute(plain).partitions(_FETCHED)
        found += [np.array([*zip(*rows, strict=True)], np.float64) for rows in parts]
    return np.concatenate(found, axis=1)


def distributions(store: ReplayStore, query: Query) -> QueryResult:
    """Return the distributions of all rows of a query.

    `total` counts the rows. `fields` has the `bars` of each field (see `bars_of`) and its number of `unknown` values.
    `choices` counts texts. `staleness` is of the rows that can be drawn. All are None if filters ask about messages,
    because counting would read every conversation.
    """
    with store.reading() as connection:
        age = staleness(connection, query.run)
        rows = conditions(query.filters, known={"staleness": age})
        if rows.messages is not None:
            return dict.fromkeys(("total", "fields", "choices", "staleness"))
        mine = sa.and_(run_is(query.run, _rows.run), rows.columns)
        columns = (_rows.reward, _rows.num_tokens, age, _rows.uses, groups.c.success_rate, _rows.num_turns)
        joined = schema.trajectories.outerjoin(groups, groups.c.id == _rows.group)
        values = read_numbers(connection, sa.select(*columns).select_from(joined).where(mine))
        return {
            "total": values.shape[1],
            "fields": {name: _field(name, column) for name, column in zip(FIELDS_SHOWN, values, strict=True)},
            "choices": _choices(connection, mine),
            "staleness": buffer_staleness(connection, age, mine),
        }


def _field(name: str, values: npt.NDArray[np.float64]) -> QueryResult:
    """Return the bars of a field, and the number of unknown values."""
    known, counts = np.unique(values[np.isfinite(values)], return_counts=True)
    bars = bars_of(name, known.tolist(), whole=FIELDS[name].kind is FieldKind.whole)
    places = np.searchsorted([bar["low"] for bar in bars[1:]], known, side="right")
    inside = np.bincount(places, counts, len(bars)).astype(int).tolist()
    shown = [{**bar, "count": count} for bar, count in zip(bars, inside, strict=True)]
    return {"unknown": len(values) - int(counts.sum()), "bars": shown}


def _choices(connection: sa.Connection, mine: sa.ColumnElement[bool]) -> dict[str, dict[str, int]]:
    """Count each text of the columns CHOICES, the most frequent first."""
    # The column with the most values comes first, which makes SQLite's sort faster.
    kind, number = [_rows[name] for name in reversed(CHOICES)], sa.func.count().label("number")
    query = sa.select(*kind, number).where(mine).group_by(*kind).order_by(sa.desc("number"), *kind).limit(_KINDS)
    found: dict[str, dict[str, int]] = {name: {} for name in CHOICES}
    for row in connection.execute(query).mappings():
        for name, counts in found.items():
            counts[row[name]] = counts.get(row[name], 0) + row["number"]
    return {name: dict(sorted(counts.items(), key=lambda each: -each[1])) for name, counts in found.items()}


def bars_of(field: str, values: Sequence[float], *, whole: bool) -> list[QueryResult]:
    """Return `low`, `high` and `filter` of the bars for different, ascending `values`.

    Each of a few values has its own bar. Many values share adjacent bars of one round width: a bar holds values of at
    least `low` and below `high`. The first and the last bar also hold values that rounding has put beyond them.
    """
    if len(values) <= _BARS:
        numbers = map(_number, values)
        return [{"low": value, "high": value, "filter": f"{field} == {value!r}"} for value in numbers]
    low, high = Decimal(repr(values[0])), Decimal(repr(values[-1]))
    width = _round_width((high - low) / _BARS, whole=whole)
    first, last = (int((edge / width).to_integral_value("ROUND_FLOOR")) for edge in (low, high))
    edges = [_number(float(at * width)) for at in range(first, last + 2)]
    bars = [{"low": a, "high": b, "filter": f"{a!r} <= {field} < {b!r}"} for a, b in pairwise(edges)]
    bars[0]["filter"], bars[-1]["filter"] = f"{field} < {edges[1]!r}", f"{edges[-2]!r} <= {field}"
    return bars


def _round_width(least: Decimal, *, whole: bool) -> Decimal:
    """Return the next width that is 1, 2 or 5 times a power of ten. For whole numbers it is at least 1."""
    power = Decimal(10) ** math.floor(least.log10())
    width = next(power * times for times in (1, 2, 5, 10) if power * times >= least)
    return max(width, Decimal(1)) if whole else width


def _number(value: float) -> float:
    """Return a number for JSON: infinity becomes the largest number, and whole numbers become integers."""
    value = min(max(value, -sys.float_info.max), sys.float_info.max)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
