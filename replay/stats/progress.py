"""Whether a run still goes on, told from what it leaves behind."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from replay.databases.open import DATABASE, LOCK
from replay.records import RunRecord
from replay.schema import metrics, policies
from replay.stats.rows import Answer
from replay.store import ReplayStore

LIVE, FINISHED, STOPPED, IMPORTED = "live", "finished", "stopped", "imported"
_SECONDS, _EVALUATED, _GAVE_UP = "time/iteration", "eval/success", "run/stopped"
_LATE = 4.0
"""A run that has written nothing for so many of its longest iterations, evaluations included, has stopped;"""
_LEAST_SECONDS = 20.0
"""but never one that wrote so lately."""


def progress(store: ReplayStore, run: RunRecord, folder: Path | None = None) -> Answer:
    """`state` live, finished, stopped or imported; how far it came, of how many; seconds since it last wrote.

    Imported: nothing was trained. Finished: it has made its iterations, or reached its held-out success twice in a row.
    Live: a process holds the lock of its `folder`, or it wrote a short while ago, as one on another machine does.
    `logged` is the newest place with metrics (0: before training, -1: none), `mark` changes with every metric there.
    """
    with store.reading() as connection:
        logged, count = _newest_metrics(connection, run.id)
        newest, longest, gave_up = _iterations(connection, run.id)
        evaluated = _last_evaluations(connection, run.id)
        published = _last_published(connection, run.id)
    written = (_last_written(folder) if folder else None) or published
    silent = None if written is None else max(0.0, time.time() - written)
    planned, target = _planned(run.config)
    if folder is not None and _is_locked(folder / LOCK):
        state = LIVE
    elif newest == 0 and planned is None:
        state = IMPORTED
    elif (planned is not None and newest >= planned) or _reached(evaluated, target):
        state = FINISHED
    elif gave_up or silent is None or silent > max(_LEAST_SECONDS, _LATE * longest):
        state = STOPPED
    else:
        state = LIVE
    return {
        "state": state,
        "iteration": newest,
        "iterations": planned,
        "logged": logged,
        "mark": f"{logged}.{count}",
        "seconds_since": silent,
    }


def _newest_metrics(connection: sa.Connection, run: str) -> tuple[int, int]:
    """An iteration's come in two parts: with its update, and after its evaluation."""
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


def _last_evaluations(connection: sa.Connection, run: str) -> Sequence[float]:
    mine = (metrics.c.run == run) & (metrics.c.name == _EVALUATED) & metrics.c.value.is_not(None)
    return connection.scalars(
        sa.select(metrics.c.value).where(mine).order_by(metrics.c.iteration.desc()).limit(2)
    ).all()


def _last_published(connection: sa.Connection, run: str) -> float | None:
    query = sa.select(policies.c.created_at).where(policies.c.run == run).order_by(policies.c.version.desc()).limit(1)
    text = connection.scalar(query)
    try:
        return None if text is None else datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None  # of an import, that says something else


def _last_written(folder: Path) -> float | None:
    """A database on a server leaves its run's metrics in the folder."""
    names = (DATABASE, f"{DATABASE}-wal", "metrics.jsonl")
    return max(((folder / name).stat().st_mtime for name in names if (folder / name).is_file()), default=None)


def _planned(config: Mapping[str, Any]) -> tuple[int | None, float | None]:
    """Most iterations, and the held-out success that ends it; None where another version's words do not tell."""
    section = config.get("run")
    values = section if isinstance(section, Mapping) else {}
    planned, target = values.get("iterations"), values.get("stop_at_success")
    return planned if isinstance(planned, int) else None, target if isinstance(target, int | float) else None


def _reached(evaluated: Sequence[float], target: float | None) -> bool:
    return target is not None and len(evaluated) == 2 and min(evaluated) >= target


def _is_locked(path: Path) -> bool:
    """Whether a process of this machine holds it. To try for the lock would keep a trainer from it for a moment."""
    try:
        about = path.stat()
        held = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    device = about.st_dev
    file = f"{os.major(device):02x}:{os.minor(device):02x}:{about.st_ino}"
    return any(file in line.split() for line in held.splitlines())
