"""The runs of a database: a line each, whether one still goes on, and its curves."""

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from replay.locate import DATABASE, LOCK
from replay.questions.filters.query import QueryResult
from replay.records import RunRecord, stored_setting
from replay.storage.format import schema
from replay.storage.format.schema import metrics, policies
from replay.store import ReplayStore

_SUCCESS = "eval/success"


def runs(store: ReplayStore) -> list[QueryResult]:
    """Every run: its newest iteration, its last held-out success, and how many trajectories it has stored."""
    run = schema.runs.c
    newest = sa.select(sa.func.max(schema.iterations.c.iteration)).where(schema.iterations.c.run == run.id)
    stored = sa.select(sa.func.count()).where(schema.trajectories.c.run == run.id)
    evaluated = sa.select(metrics.c.value).where(
        metrics.c.run == run.id, metrics.c.name == _SUCCESS, metrics.c.value.is_not(None)
    )
    query = sa.select(
        run.id,
        run.name,
        sa.func.coalesce(newest.scalar_subquery(), 0).label("iterations"),
        evaluated.order_by(metrics.c.iteration.desc()).limit(1).scalar_subquery().label("success"),
        stored.scalar_subquery().label("trajectories"),
        run.code_version,
    )
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(query.order_by(run.name, run.id)).mappings()]


def run_names(store: ReplayStore) -> dict[str, str]:
    """The names of all runs by id, in the same order, without a look at what they have stored."""
    run = schema.runs.c
    with store.reading() as connection:
        return {row.id: row.name for row in connection.execute(sa.select(run.id, run.name).order_by(run.name, run.id))}


LIVE, FINISHED, STOPPED, IMPORTED = "live", "finished", "stopped", "imported"
_SECONDS, _GAVE_UP = "time/iteration", "run/stopped"
_LATE = 4.0
"""A run that has written nothing for so many of its longest iterations, evaluations included, has stopped;"""
_LEAST_SECONDS = 20.0
"""but never one that wrote so lately."""


def progress(store: ReplayStore, run: RunRecord, folder: Path | None = None) -> QueryResult:
    """`state` live, finished, stopped or imported; how far it came, of how many; seconds since it last wrote.

    Imported: nothing was trained. Finished: it has made its iterations, or reached its held-out success twice in a row.
    Live: a process holds the lock of its `folder`, or it wrote a short while ago, as one on another machine does.
    `logged` is the newest place with metrics (0: before training, -1: none), `mark` changes with every metric there.
    """
    with store.reading() as connection:
        logged, count = _newest_metrics(connection, run.id)
        newest, longest, gave_up = _iterations(connection, run.id)
        mine = (metrics.c.run == run.id) & (metrics.c.name == _SUCCESS) & metrics.c.value.is_not(None)
        query = sa.select(metrics.c.value).where(mine).order_by(metrics.c.iteration.desc())
        evaluated = connection.scalars(query.limit(2)).all()
        published = _last_published(connection, run.id)
    written = (_last_written(folder) if folder else None) or published
    seconds_since = None if written is None else max(0.0, time.time() - written)
    planned = stored_setting(run.config, "run.iterations", int)
    target = stored_setting(run.config, "run.stop_at_success", float)
    reached = target is not None and len(evaluated) == 2 and min(evaluated) >= target
    if folder is not None and _is_locked(folder / LOCK):
        state = LIVE
    elif newest == 0 and planned is None:
        state = IMPORTED
    elif (planned is not None and newest >= planned) or reached:
        state = FINISHED
    elif gave_up or seconds_since is None or seconds_since > max(_LEAST_SECONDS, _LATE * longest):
        state = STOPPED
    else:
        state = LIVE
    return {
        "state": state,
        "iteration": newest,
        "iterations": planned,
        "logged": logged,
        "mark": f"{logged}.{count}",
        "seconds_since": seconds_since,
    }


def newest_logged(store: ReplayStore, run: str) -> int:
    """The newest iteration with metrics (0: before training, -1: none)."""
    with store.reading() as connection:
        return _newest_metrics(connection, run)[0]


def _newest_metrics(connection: sa.Connection, run: str) -> tuple[int, int]:
    """The newest iteration with metrics and their number; they come with its update, and after its evaluation."""
    query = sa.select(metrics.c.iteration, sa.func.count()).where(metrics.c.run == run).group_by(metrics.c.iteration)
    found = connection.execute(query.order_by(metrics.c.iteration.desc()).limit(1)).one_or_none()
    return (-1, 0) if found is None else (found[0], found[1])


def _iterations(connection: sa.Connection, run: str) -> tuple[int, float, bool]:
    """The newest whole one, the longest one's seconds, and whether training could not go on after it."""
    query = sa.select(metrics.c.name, sa.func.max(metrics.c.iteration), sa.func.max(metrics.c.value))
    query = query.where(metrics.c.run == run, metrics.c.name.in_((_SECONDS, _GAVE_UP))).group_by(metrics.c.name)
    found = {name: (iteration, value) for name, iteration, value in connection.execute(query)}
    newest, longest = found.get(_SECONDS, (0, 0.0))
    return newest, longest or 0.0, found.get(_GAVE_UP, (0, 0.0))[0] > newest


def _last_published(connection: sa.Connection, run: str) -> float | None:
    query = sa.select(policies.c.created_at).where(policies.c.run == run).order_by(policies.c.version.desc()).limit(1)
    try:
        return datetime.fromisoformat(connection.scalar(query) or "").timestamp()
    except ValueError:
        return None  # there is none, or it is of an import, that says something else


def _last_written(folder: Path) -> float | None:
    """A database on a server leaves its run's metrics in the folder."""
    names = (DATABASE, f"{DATABASE}-wal", "metrics.jsonl")
    return max(((folder / name).stat().st_mtime for name in names if (folder / name).is_file()), default=None)


def _is_locked(path: Path) -> bool:
    """Whether a process of this machine holds it. To try for the lock would keep a trainer from it for a moment."""
    try:
        about = path.stat()
        held = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    file = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    return any(file in line.split() for line in held.splitlines())


Series = Sequence[tuple[int, float]]
"""(iteration, value), ascending."""
Metrics = Mapping[str, Series]

ALL = range(2**53)
MOST_POINTS = 256
"""The most points of a curve that is shown in merged ones."""
STOPS = "rollout/stop/"
"""Begins the names of shares of episodes, by stop reason; those that are 0 are not logged."""

# NaN is above every number on a server, and so is infinity.
_KNOWN = metrics.c.value.between(-sys.float_info.max, sys.float_info.max)


def metric_series(
    store: ReplayStore,
    run: str,
    *,
    names: Sequence[str] = (),
    families: Sequence[str] = (),
    within: range = ALL,
    merged: int = 1,
) -> dict[str, list[tuple[int, float]]]:
    """(iteration, value) in order, by metric name, of iterations `within`; values that were not known are left out.

    Of these `names`, and of those that begin like one of `families`; of all where neither is given. Each point is
    `merged` iterations, named by the first, whole where it stands half within. Its value is their mean, and the largest
    of metrics that are largest values (`..._max`).
    """
    iteration = metrics.c.iteration
    place: sa.ColumnElement[int] = iteration
    if merged > 1:
        place = sa.case((iteration < 1, iteration), else_=iteration - (iteration - 1) % merged)
        first, last = max(0, within.start), within.stop - 1
        start = first - (first - 1) % merged if first else 0
        within = range(start, last - (last - 1) % merged + merged if last > 0 else 1)
    begin = (metrics.c.name.startswith(each, autoescape=True) for each in families)
    wanted = sa.or_(metrics.c.name.in_(names), *begin) if names or families else sa.true()
    points = sa.select(metrics.c.name, place.label("place"), metrics.c.value).where(
        metrics.c.run == run, wanted, _KNOWN, iteration.between(within.start, within.stop - 1)
    )
    query = _merged(points, run, merged) if merged > 1 else points.order_by("place", metrics.c.name)
    series: dict[str, list[tuple[int, float]]] = {}
    with store.reading() as connection:
        for name, at, value in connection.execute(query):
            series.setdefault(name, []).append((at, value))
    return series


def finite(metrics: Metrics, name: str) -> Series:
    """A metric's points, without those that are no numbers; empty where it was never logged."""
    return [point for point in metrics.get(name, ()) if math.isfinite(point[1])]


def _merged(points: sa.Select[Any], run: str, merged: int) -> sa.Select[Any]:
    point = points.subquery().c
    newest = sa.select(sa.func.max(metrics.c.iteration)).where(metrics.c.run == run).scalar_subquery()
    end = point.place + merged - 1
    ends = sa.case((point.place < 1, point.place), (end > newest, newest), else_=end)
    known = sa.case(
        (point.name.endswith("_max", autoescape=True), sa.func.max(point.value)),
        # Where a share was 0 it was not logged: the sum counts for every iteration that there was.
        (point.name.startswith(STOPS, autoescape=True), sa.func.sum(point.value) / (ends - point.place + 1)),
        else_=sa.func.avg(point.value),
    )
    query = sa.select(point.name, point.place, known).group_by(point.place, point.name)
    return query.order_by(point.place, point.name)


def merging(store: ReplayStore, runs: Sequence[str], within: range = ALL) -> int:
    """How many iterations to show as one point, for curves of these runs to stay short: a power of two, mostly 1."""
    with store.reading() as connection:
        newest = connection.scalar(sa.select(sa.func.max(metrics.c.iteration)).where(metrics.c.run.in_(runs))) or 0
    return merged_to(min(within.stop - 1, newest) - max(1, within.start) + 1)


def merged_to(iterations: int) -> int:
    """How many of so many iterations to show as one point."""
    return 1 << (max(1, math.ceil(iterations / MOST_POINTS)) - 1).bit_length()
