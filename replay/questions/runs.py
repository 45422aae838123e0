"""The runs of a database: a summary of each, whether it still goes on, and its metrics as curves."""

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from replay.locate import DATABASE, LOCK
from replay.questions.filters.query import QueryResult
from replay.records import RunRecord, stored_setting
from replay.storage.format import schema
from replay.storage.format.schema import metrics
from replay.storage.format.views import IS_EPISODE, WAS_EPISODE
from replay.store import ReplayStore

_SUCCESS = "eval/success"
_Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""
_BY_ITERATION = (metrics, schema.iterations, schema.groups)


def runs(store: ReplayStore) -> list[QueryResult]:
    """List all runs with their newest iteration, their last held-out success on so many `evaluated` tasks, and their
    number of stored rows."""
    run = schema.runs.c
    newest = sa.select(sa.func.max(schema.iterations.c.iteration)).where(schema.iterations.c.run == run.id)
    stored = sa.select(sa.func.count()).where(schema.trajectories.c.run == run.id)

    def newest_value(name: str) -> sa.ScalarSelect[Any]:
        known = (metrics.c.run == run.id) & (metrics.c.name == name) & metrics.c.value.is_not(None)
        return sa.select(metrics.c.value).where(known).order_by(metrics.c.iteration.desc()).limit(1).scalar_subquery()

    query = sa.select(
        run.id,
        run.name,
        sa.func.coalesce(newest.scalar_subquery(), 0).label("iterations"),
        newest_value(_SUCCESS).label("success"),
        newest_value("eval/tasks").label("evaluated"),
        stored.scalar_subquery().label("trajectories"),
        run.code_version,
    )
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(query.order_by(run.name, run.id)).mappings()]


def run_names(store: ReplayStore) -> dict[str, str]:
    """Return the names of all runs by id, in the order of `runs`. It takes less time, as no row is counted."""
    run = schema.runs.c
    with store.reading() as connection:
        return {row.id: row.name for row in connection.execute(sa.select(run.id, run.name).order_by(run.name, run.id))}


LIVE, FINISHED, STOPPED, IDLE = "live", "finished", "stopped", "idle"
IMPORTED, RECORDED = "imported", "recorded"
_SECONDS, _GAVE_UP = "time/iteration", "run/stopped"
_LATE = 4.0
"""A run has stopped if it wrote nothing for this many times its longest iteration, evaluations included."""
_LEAST_SECONDS = 20.0
"""A run that wrote within these seconds has not stopped."""


def progress(store: ReplayStore, run: RunRecord, folder: Path | None = None) -> QueryResult:
    """Return the progress of a run: its `state`, its newest iteration of all planned ones, and when it last wrote.

    - live: a process holds the lock of the run's `folder`, or the run wrote a short while ago.
    - imported: its rows came from a file or another buffer. Nothing was trained here.
    - recorded: a gateway recorded its rows. Nothing was trained here.
    - finished: the run has made its iterations, or is marked as ended.
    - stopped: none of these. It is `idle` if its plan is not known: a trainer of one's own may be done, or go on.

    `logged` is the newest iteration with metrics (0: before training, -1: none). `mark` changes with every metric and
    iteration.
    """
    run_of = schema.runs.c
    with store.reading() as connection:
        logged, count = _newest_metrics(connection, run.id)
        newest, longest, gave_up = _iterations(connection, run.id)
        ended, epoch = connection.execute(sa.select(run_of.ended, run_of.epoch).where(run_of.id == run.id)).one()
        has_rows, has_draws = (
            connection.scalar(sa.select(sa.exists().where(table.c.run == run.id)))
            for table in (schema.groups, schema.draws)
        )
        stored = _last_stored(connection, run.id)
    written = (_last_written(folder) if folder else None) or stored
    seconds_since = None if written is None else max(0.0, time.time() - written)
    planned = stored_setting(run.config, "run.iterations", int)
    if folder is not None and _is_locked(folder / LOCK):
        state = LIVE
    elif stored_setting(run.config, "gateway.text", bool) is not None:
        state = RECORDED
    elif has_rows and not has_draws and newest == epoch == 0 and logged < 0:
        state = IMPORTED
    elif ended or (planned is not None and newest >= planned):
        state = FINISHED
    elif gave_up or seconds_since is None or seconds_since > max(_LEAST_SECONDS, _LATE * longest):
        state = STOPPED if planned is not None or gave_up else IDLE
    else:
        state = LIVE
    return {
        "state": state,
        "iteration": newest,
        "iterations": planned,
        "logged": logged,
        "mark": f"{logged}.{count}.{newest}",
        "seconds_since": seconds_since,
    }


def newest_known(store: ReplayStore, run: str) -> int:
    """Return the newest iteration with metrics, a batch or groups (0: before training, -1: none)."""
    with store.reading() as connection:
        of = (sa.select(sa.func.max(table.c.iteration)).where(table.c.run == run) for table in _BY_ITERATION)
        return max(found if (found := connection.scalar(query)) is not None else -1 for query in of)


def _newest_metrics(connection: sa.Connection, run: str) -> tuple[int, int]:
    """Return the newest iteration with metrics, and their number. An evaluation adds metrics after the update."""
    query = sa.select(metrics.c.iteration, sa.func.count()).where(metrics.c.run == run).group_by(metrics.c.iteration)
    found = connection.execute(query.order_by(metrics.c.iteration.desc()).limit(1)).one_or_none()
    return (-1, 0) if found is None else (found[0], found[1])


def _iterations(connection: sa.Connection, run: str) -> tuple[int, float, bool]:
    """Return the newest finished iteration, the seconds of the longest, and whether training gave up afterwards."""
    query = sa.select(metrics.c.name, sa.func.max(metrics.c.iteration), sa.func.max(metrics.c.value))
    query = query.where(metrics.c.run == run, metrics.c.name.in_((_SECONDS, _GAVE_UP))).group_by(metrics.c.name)
    found = {name: (iteration, value) for name, iteration, value in connection.execute(query)}
    newest, longest = found.get(_SECONDS, (0, 0.0))
    committed = sa.select(sa.func.max(schema.iterations.c.iteration)).where(schema.iterations.c.run == run)
    made = max(newest, connection.scalar(committed) or 0)
    return made, longest or 0.0, found.get(_GAVE_UP, (0, 0.0))[0] > newest


def _last_stored(connection: sa.Connection, run: str) -> float | None:
    """Return when the run last published a policy or stored a row."""
    policy, row = schema.policies.c, schema.trajectories.c
    queries = (
        sa.select(policy.created_at).where(policy.run == run).order_by(policy.version.desc()),
        sa.select(row.created_at).where(row.run == run).order_by(row.iteration.desc(), row.slot.desc()),
    )
    times = []
    for query in queries:
        with suppress(ValueError):  # there is none, or an import gave no readable time
            times.append(datetime.fromisoformat(connection.scalar(query.limit(1)) or "").timestamp())
    return max(times, default=None)


def _last_written(folder: Path) -> float | None:
    """Return when the run last wrote to its folder. If the database is on a server, the folder has the metrics."""
    names = (DATABASE, f"{DATABASE}-wal", "metrics.jsonl")
    return max(((folder / name).stat().st_mtime for name in names if (folder / name).is_file()), default=None)


def _is_locked(path: Path) -> bool:
    """Whether a process of this machine holds the lock. Trying to take it could get in the way of a trainer."""
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
"""Most points of a curve. A longer run is shown in merged points."""
STOPS = "rollout/stop/"
"""The prefix of the metrics that count episodes by stop reason. A share of 0 is not logged."""

# On PostgreSQL, NaN and infinity are above every number.
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
    """Return metrics as ordered points (iteration, value), by name. Unknown values are left out.

    Only metrics in `names`, or whose name begins with one of `families`, are returned; without either, all. The points
    are of iterations `within`. A point merges `merged` iterations and is named by the first of them; a point that is
    partly within is returned whole. Its value is the mean over its iterations, or their largest for metrics named
    `..._max`.
    """
    iteration, within = metrics.c.iteration, whole_points(within, merged)
    place = sa.case((iteration < 1, iteration), else_=iteration - (iteration - 1) % merged) if merged > 1 else iteration
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


def whole_points(within: range, merged: int) -> range:
    """Return the iterations of all points that are at least partly within."""
    first, last = max(0, within.start), within.stop - 1
    start = first - (first - 1) % merged if first else 0
    return range(start, last - (last - 1) % merged + merged if last > 0 else 1)


def finite(metrics: Metrics, name: str) -> Series:
    """Return the finite points of a metric. There are none if the metric was never logged."""
    return [point for point in metrics.get(name, ()) if math.isfinite(point[1])]


def wilson_bounds(share: float, trials: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of independent trials (Wilson 1927), which is valid near 0 and 1, too.

    Centre (p + z^2 / 2n) / (1 + z^2 / n), half-width z sqrt(p (1 - p) / n + z^2 / 4n^2) / (1 + z^2 / n).
    """
    scale = 1.0 + _Z**2 / trials
    centre = (share + _Z**2 / (2 * trials)) / scale
    half = _Z * math.sqrt(share * (1.0 - share) / trials + _Z**2 / (4 * trials**2)) / scale
    # With no success, or with successes alone, the bound on that side is the value itself, up to rounding.
    return 0.0 if share == 0 else centre - half, 1.0 if share == 1 else centre + half


AMOUNTS = ("iterations", "episodes", "generated tokens", "hours")
"""The amounts over which curves are compared."""


def spent(store: ReplayStore, run: str, amount: str) -> list[tuple[int, float]]:
    """Return points (iteration, amount that it took) of a run's episodes, sampled tokens or hours.

    An iteration may have several points. Rows that a resume undid and hindsight do not count. Hours are those of the
    warm-up, of iterations and of evaluations, as logged.
    """
    if amount == "hours":
        logged = metric_series(store, run, names=("time/warm_up", _SECONDS, "time/evaluation"))
        return [(at, seconds / 3600) for points in logged.values() if _SECONDS in logged for at, seconds in points]
    number = sa.func.count if amount == "episodes" else sa.func.sum
    row, gone, place = schema.trajectories.c, schema.reclaimed.c, schema.groups.c
    stored = sa.select(row.iteration, number(row.num_action_tokens)).where(row.run == run, IS_EPISODE)
    evicted = sa.select(place.iteration, number(gone.num_action_tokens))
    evicted = evicted.where(place.run == run, place.id == gone.group, WAS_EPISODE)
    both = stored.group_by(row.iteration).union_all(evicted.group_by(place.iteration))
    with store.reading() as connection:
        return [(at, int(count)) for at, count in connection.execute(both)]


def _merged(points: sa.Select[Any], run: str, merged: int) -> sa.Select[Any]:
    point = points.subquery().c
    newest = sa.select(sa.func.max(metrics.c.iteration)).where(metrics.c.run == run).scalar_subquery()
    end = point.place + merged - 1
    ends = sa.case((point.place < 1, point.place), (end > newest, newest), else_=end)
    known = sa.case(
        (point.name.endswith("_max", autoescape=True), sa.func.max(point.value)),
        # A share of 0 was not logged, so the sum is divided by the number of all iterations of the point.
        (point.name.startswith(STOPS, autoescape=True), sa.func.sum(point.value) / (ends - point.place + 1)),
        else_=sa.func.avg(point.value),
    )
    query = sa.select(point.name, point.place, known).group_by(point.place, point.name)
    return query.order_by(point.place, point.name)


def merged_to(iterations: int) -> int:
    """Return how many iterations to merge into one point of a curve over so many iterations."""
    return 1 << (max(1, math.ceil(iterations / MOST_POINTS)) - 1).bit_length()
