"""What happened iteration by iteration."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from replay.schema import metrics
from replay.stats.rows import of_run
from replay.store import ReplayStore

Series = dict[str, list[tuple[int, float]]]
"""By metric name."""

ALL = range(2**53)
"""Iterations."""
MOST_POINTS = 256
"""Of a curve that is told in merged points."""
STOPS = "rollout/stop/"
"""Begins the names of shares of episodes, by stop reason; those that are 0 are not logged."""

# NaN is above every number on a server, and so is infinity.
_KNOWN = metrics.c.value.between(-sys.float_info.max, sys.float_info.max)


def metric_series(
    store: ReplayStore, run: str, *, names: Sequence[str] = (), families: Sequence[str] = (), within: range = ALL
) -> Series:
    """(iteration, value) in order, by metric name, of iterations `within`; values that were not known are left out.

    Of these `names`, and of those that begin like one of `families`; of all where neither is given.
    """
    query = of_run(run, metrics.c.run, metrics.c.name, metrics.c.iteration, metrics.c.value)
    query = query.where(_wanted(names, families), _KNOWN, _are_in(within))
    return _by_name(store, query.order_by(metrics.c.iteration, metrics.c.name))


def merged_series(
    store: ReplayStore,
    run: str,
    merged: int,
    *,
    names: Sequence[str] = (),
    families: Sequence[str] = (),
    within: range = ALL,
) -> Series:
    """As `metric_series`, each point being so many iterations, named by the first; what came before training is apart.

    Its value is their mean; of metrics that are largest values (`..._max`) it is the largest, so that no peak is lost.
    Points that stand half within are there whole.
    """
    iteration = metrics.c.iteration
    place = sa.case((iteration < 1, iteration), else_=iteration - (iteration - 1) % merged)
    first, last = max(0, within.start), within.stop - 1
    whole = range(first - (first - 1) % merged if first else 0, last - (last - 1) % merged + merged if last > 0 else 1)
    chosen = of_run(run, metrics.c.run, metrics.c.name, place.label("place"), metrics.c.value)
    point = chosen.where(_wanted(names, families), _KNOWN, _are_in(whole)).subquery().c
    newest = sa.select(sa.func.max(iteration)).where(metrics.c.run == run).scalar_subquery()
    end = point.place + merged - 1
    ends = sa.case((point.place < 1, point.place), (end > newest, newest), else_=end)
    told = sa.case(
        (point.name.endswith("_max", autoescape=True), sa.func.max(point.value)),
        # Where a share was 0 it was not logged: the sum counts for every iteration that there was.
        (point.name.startswith(STOPS, autoescape=True), sa.func.sum(point.value) / (ends - point.place + 1)),
        else_=sa.func.avg(point.value),
    )
    query = sa.select(point.name, point.place, told).group_by(point.place, point.name)
    return _by_name(store, query.order_by(point.place, point.name))


def merging(store: ReplayStore, runs: Sequence[str], within: range = ALL) -> int:
    """How many iterations to tell as one point, for curves of these runs to stay short: a power of two, mostly 1."""
    newest = [sa.select(sa.func.max(metrics.c.iteration)).where(metrics.c.run == run) for run in runs]
    with store.reading() as connection:
        last = min(within.stop - 1, max((connection.scalar(query) or 0) for query in newest))
    together = max(1, math.ceil((last - max(1, within.start) + 1) / MOST_POINTS))
    return 1 << (together - 1).bit_length()


def _are_in(within: range) -> sa.ColumnElement[bool]:
    return metrics.c.iteration.between(within.start, within.stop - 1)


def _wanted(names: Sequence[str], families: Sequence[str]) -> sa.ColumnElement[bool]:
    if not names and not families:
        return sa.true()
    return sa.or_(metrics.c.name.in_(names), *(metrics.c.name.startswith(each, autoescape=True) for each in families))


def _by_name(store: ReplayStore, query: sa.Select[Any]) -> Series:
    series: Series = {}
    with store.reading() as connection:
        for name, iteration, value in connection.execute(query):
            series.setdefault(name, []).append((iteration, value))
    return series
