"""The series of a run that its tables know, in the shape of metrics, so that no trainer has to log them."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from replay.questions.runs import ALL, STOPS, Metrics, Series, metric_series, point_of, whole_points
from replay.records import COMMITTED, FRESH, REPLAY
from replay.storage.format.schema import draws, groups, iterations, reclaimed, trajectories
from replay.storage.format.views import COUNTS_AS_ATTEMPTS, IS_EPISODE, WITHOUT_SIGNAL
from replay.storage.retention import buffer_metrics
from replay.store import ReplayStore

GROUPS, FLAT_GROUPS = "groups/collected", "groups/without_signal"
"""The number of groups that an iteration collected, and of those without signal. They are never logged."""
_BUFFER = ("buffer/rows", "buffer/eligible")
_STREAMS = {stream: draws.c.stream == stream for stream in (FRESH, REPLAY)}
_TOKENS = sa.func.coalesce(trajectories.c.num_action_tokens, reclaimed.c.num_action_tokens)


def _share(part: Any, whole: Any) -> sa.ColumnElement[float]:
    return sa.cast(part, sa.Double) / sa.func.nullif(whole, 0)


def _by_size(column: sa.Column[float]) -> sa.ColumnElement[float]:
    return _share(sa.func.sum(groups.c.size * column), sa.func.sum(groups.c.size))


_SUM = {name: sa.func.sum(iterations.c[name]) for name in ("fresh", "replay", "planned_fresh", "planned_replay")}
_FLAT = sa.func.sum(sa.cast(WITHOUT_SIGNAL, sa.Integer))
_Source = tuple[sa.Table, sa.FromClause, sa.ColumnElement[bool], Mapping[str, sa.ColumnElement[Any]]]
_SOURCES: Sequence[_Source] = (
    (
        iterations,
        iterations,
        sa.true(),
        {
            **{f"batch/{name}": sa.func.avg(iterations.c[name]) for name in _SUM},
            "batch/fraction": sa.func.avg(iterations.c.fraction),
            "batch/ruled_fraction": _share(_SUM["planned_replay"], _SUM["planned_fresh"] + _SUM["planned_replay"]),
            "batch/achieved_fraction": _share(_SUM["replay"], _SUM["fresh"] + _SUM["replay"]),
        },
    ),
    (
        groups,
        groups,
        COUNTS_AS_ATTEMPTS,
        {
            "rollout/success": _by_size(groups.c.success_rate),
            "rollout/reward": _by_size(groups.c.reward_mean),
            "rollout/groups_without_signal": _share(_FLAT, sa.func.count()),
            GROUPS: sa.func.count(),
            FLAT_GROUPS: _FLAT,
        },
    ),
    (
        trajectories,
        trajectories,
        IS_EPISODE,
        {f"rollout/{name}": sa.func.avg(trajectories.c[f"num_{name}"]) for name in ("turns", "tokens")},
    ),
    (
        draws,
        draws,
        draws.c.state == COMMITTED,
        {
            "replay/staleness_mean": sa.func.avg(draws.c.staleness).filter(_STREAMS[REPLAY]),
            "replay/staleness_max": sa.func.max(draws.c.staleness).filter(_STREAMS[REPLAY]),
            **{
                f"actor/{stream}/token_gap_max": sa.func.max(draws.c.token_gap_max).filter(mine)
                for stream, mine in _STREAMS.items()
            },
        },
    ),
    (
        draws,
        draws.outerjoin(trajectories, trajectories.c.id == draws.c.trajectory).outerjoin(
            reclaimed, reclaimed.c.id == draws.c.trajectory
        ),
        (draws.c.state == COMMITTED) & draws.c.drift_mean.is_not(None),
        {
            f"actor/{stream}/drift_mean": _share(
                sa.func.sum(draws.c.drift_mean * _TOKENS).filter(mine), sa.func.sum(_TOKENS).filter(mine)
            )
            for stream, mine in _STREAMS.items()
        },
    ),
)
"""Tables by iteration: what is selected from, the rows that count, and the columns by the metrics that they stand for.
Drift is the mean over tokens, as where it is logged."""
TABLE_SERIES = frozenset(name for *_, columns in _SOURCES for name in columns)


def table_series(
    store: ReplayStore, run: str, names: Collection[str], *, within: range = ALL, merged: int = 1
) -> dict[str, Series]:
    """Return those of the named series that tables know. A point merges `merged` of the iterations `within`."""
    within, found = whole_points(within, merged), dict[str, list[tuple[int, float]]]()
    with store.reading() as connection:
        for table, joined, counts, columns in _SOURCES:
            wanted = {name: column for name, column in columns.items() if name in names}
            if not wanted:
                continue
            place = point_of(table.c.iteration, merged).label("place")
            mine = (table.c.run == run) & table.c.iteration.between(within.start, within.stop - 1)
            query = sa.select(place, *wanted.values()).select_from(joined).where(mine, counts)
            for at, *values in connection.execute(query.group_by("place").order_by("place")):
                for name, value in zip(wanted, values, strict=True):
                    if value is not None:
                        found.setdefault(name, []).append((at, float(value)))
        if STOPS in names:
            place, reason = point_of(trajectories.c.iteration, merged).label("place"), trajectories.c.stop_reason
            mine = (trajectories.c.run == run) & trajectories.c.iteration.between(within.start, within.stop - 1)
            query = sa.select(reason, place, sa.func.count()).where(mine, IS_EPISODE).group_by("place", reason)
            counts = connection.execute(query.order_by("place")).all()
            episodes = Counter[int]()
            for _, at, count in counts:
                episodes[at] += count
            for why, at, count in counts:
                found.setdefault(STOPS + why, []).append((at, count / episodes[at]))
        if set(_BUFFER) & set(names):
            stored = buffer_metrics(connection, run)
            found |= {name: [(within.stop - 1, stored[name])] for name in _BUFFER if stored["buffer/rows"]}
    return dict(found)


def run_series(
    store: ReplayStore,
    run: str,
    *,
    names: Sequence[str],
    families: Sequence[str] = (),
    within: range = ALL,
    merged: int = 1,
) -> Metrics:
    """Return the named metrics and families of metrics where they were logged, and what the tables know elsewhere."""
    logged = metric_series(store, run, names=names, families=families, within=within, merged=merged)
    families = [family for family in families if not any(name.startswith(family) for name in logged)]
    known = table_series(store, run, {*names, *families} - logged.keys(), within=within, merged=merged)
    return {**known, **logged}
