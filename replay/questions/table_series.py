"""The series of a run that its tables know, in the shape of metrics, so that no trainer has to log them."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa

from replay.questions.runs import ALL, Metrics, Series, metric_series, whole_points
from replay.records import COMMITTED, ELIGIBLE, EVICTED, ORPHANED, REPLAY
from replay.storage.format.schema import draws, groups, iterations, reclaimed, trajectories
from replay.storage.format.views import COUNTS_AS_ATTEMPTS, IS_EPISODE, WITHOUT_SIGNAL
from replay.store import ReplayStore

GROUPS, FLAT_GROUPS = "groups/collected", "groups/without_signal"
"""The number of groups that an iteration collected, and of those without signal. They are never logged."""
_ROWS, _ELIGIBLE = "buffer/rows", "buffer/eligible"
_made, _used = iterations.c, draws.c


def _share(part: Any, whole: Any) -> sa.ColumnElement[Any]:
    return sa.cast(sa.func.sum(part), sa.Double) / sa.func.nullif(sa.func.sum(whole), 0)


_own = trajectories.alias()
_place = sa.and_(*(_own.c[name] == _used[name] for name in ("run", "iteration", "slot")), _own.c.id == _used.trajectory)
_other = sa.case((_own.c.id.is_(None), _used.trajectory))
WITH_TOKENS = (
    draws.outerjoin(_own, _place)
    .outerjoin(trajectories, trajectories.c.id == _other)
    .outerjoin(reclaimed, reclaimed.c.id == _other)
)
"""Draws with their rows, evicted ones included. An index finds fresh rows by their place without reading them."""
TOKENS = sa.func.coalesce(*(table.c.num_action_tokens for table in (_own, trajectories, reclaimed)))
"""The sampled tokens of the rows of WITH_TOKENS."""
_FLAT = sa.cast(WITHOUT_SIGNAL, sa.Integer)
_SERIES: Mapping[sa.Table, Mapping[str, sa.ColumnElement[Any]]] = {
    iterations: {
        **{
            f"batch/{name}": sa.func.avg(_made[name]) for name in ("fresh", "replay", "planned_fresh", "planned_replay")
        },
        "batch/fraction": sa.func.avg(_made.fraction),
        "batch/ruled_fraction": _share(_made.planned_replay, _made.planned_fresh + _made.planned_replay),
        "batch/achieved_fraction": _share(_made.replay, _made.fresh + _made.replay),
    },
    groups: {
        "rollout/success": _share(groups.c.size * groups.c.success_rate, groups.c.size),
        "rollout/reward": _share(groups.c.size * groups.c.reward_mean, groups.c.size),
        "rollout/groups_without_signal": sa.func.avg(_FLAT),
        "rollout/groups_all_failed": sa.func.avg(_FLAT * sa.cast(groups.c.success_rate == 0.0, sa.Integer)),
        "rollout/groups_all_solved": sa.func.avg(_FLAT * sa.cast(groups.c.success_rate == 1.0, sa.Integer)),
        GROUPS: sa.func.count(),
        FLAT_GROUPS: sa.func.sum(_FLAT),
    },
    trajectories: {f"rollout/{name}": sa.func.avg(trajectories.c[f"num_{name}"]) for name in ("turns", "tokens")},
    draws: {
        "replay/staleness_mean": sa.func.avg(_used.staleness),
        "replay/staleness_max": sa.func.max(_used.staleness),
        "actor/replay/token_gap_max": sa.func.max(_used.token_gap_max),
        "actor/replay/drift_mean": _share(_used.drift_mean * TOKENS, sa.case((_used.drift_mean.is_not(None), TOKENS))),
    },
}
"""The series of each table, by the names under which metrics are logged. Drift is the mean over tokens, as there."""
_COUNTS = {
    groups: COUNTS_AS_ATTEMPTS,
    trajectories: IS_EPISODE,
    draws: (_used.state == COMMITTED) & (_used.stream == REPLAY),
}
"""The rows of a table that count."""
TABLE_SERIES = frozenset(name for columns in _SERIES.values() for name in columns)


def table_series(store: ReplayStore, run: str, names: Collection[str], *, within: range = ALL) -> dict[str, Series]:
    """Return those of the named series that tables know, of iterations `within`."""
    found: dict[str, list[tuple[int, float]]] = {}
    with store.reading() as connection:
        for table, columns in _SERIES.items():
            wanted = {name: column for name, column in columns.items() if name in names}
            at = table.c.iteration
            query = sa.select(at, *wanted.values()).select_from(WITH_TOKENS if table is draws else table)
            query = query.where(table.c.run == run, at.between(within.start, within.stop - 1))
            query = query.where(_COUNTS.get(table, sa.true())).group_by(at).order_by(at)
            for iteration, *values in connection.execute(query) if wanted else ():
                for name, value in zip(wanted, values, strict=True):
                    if value is not None:
                        found.setdefault(name, []).append((iteration, float(value)))
        if _ROWS in names:
            drawable = sa.func.count().filter(trajectories.c.state == ELIGIBLE)
            kept = (trajectories.c.run == run) & trajectories.c.state.not_in((ORPHANED, EVICTED))
            counts = connection.execute(sa.select(sa.func.count(), drawable).where(kept)).one()
            found |= {name: [(within.stop - 1, count)] for name, count in zip((_ROWS, _ELIGIBLE), counts, strict=True)}
    return dict(found)


def run_series(
    store: ReplayStore,
    run: str,
    *,
    names: Sequence[str],
    families: Sequence[str] = (),
    within: range = ALL,
    merged: int = 1,
    known: Metrics = MappingProxyType({}),
) -> Metrics:
    """Return the named metrics and families of metrics where they were logged, and what the tables know elsewhere.

    A point merges `merged` iterations. `known` has series of all iterations that were read before.
    """
    logged = metric_series(store, run, names=names, families=families, within=within, merged=merged)
    unlogged, within = set(names) - logged.keys(), whole_points(within, merged)
    found = table_series(store, run, unlogged - known.keys(), within=within)
    found |= {name: [point for point in known[name] if point[0] in within] for name in unlogged & known.keys()}
    return {**{name: _merged(name, points, merged) for name, points in found.items()}, **logged}


def _merged(name: str, points: Series, merged: int) -> Series:
    """Merge points as those of metrics are."""
    of = groupby(points, key=lambda point: point[0] if point[0] < 1 else point[0] - (point[0] - 1) % merged)
    values = ((place, [value for _, value in group]) for place, group in of)
    return [(place, max(each) if name.endswith("_max") else fmean(each)) for place, each in values]
