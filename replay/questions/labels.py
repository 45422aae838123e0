"""Which labels there are, and the lists that somebody named."""

from __future__ import annotations

import sqlalchemy as sa

from replay.questions.filters.query import QueryResult, run_is
from replay.storage.format.schema import run_labels, saved_views, trajectories, trajectory_labels
from replay.storage.labels import labels_of
from replay.store import ReplayStore


def label_counts(store: ReplayStore, run: str | None = None) -> list[QueryResult]:
    """Each label of a run and of its trajectories, or of all: how many have it, how many notes, and the newest."""
    mine, newest = trajectory_labels.c, sa.func.max
    count, notes = sa.func.count(), sa.func.count(mine.note)
    rows = sa.select(mine.label, count, notes, newest(mine.created_at)).join(trajectories)
    rows = rows.where(run_is(run, trajectories.c.run)).group_by(mine.label)
    of = run_labels.c
    of_runs = sa.select(of.label, count, sa.func.count(of.note), newest(of.created_at)).where(run_is(run, of.run))
    found: dict[str, QueryResult] = {}
    with store.reading() as connection:
        for on, query in (("trajectories", rows), ("runs", of_runs.group_by(of.label))):
            for label, number, noted, created_at in connection.execute(query):
                nothing = {"label": label, "trajectories": 0, "runs": 0, "notes": 0, "newest": ""}
                line = found.setdefault(label, nothing)
                line |= {on: number, "notes": line["notes"] + noted, "newest": max(line["newest"], created_at)}
    return [found[label] for label in sorted(found)]


def run_labels_of(store: ReplayStore, run: str) -> list[QueryResult]:
    with store.reading() as connection:
        return [vars(label) for label in labels_of(connection, [run], "run").get(run, ())]


def views(store: ReplayStore) -> list[QueryResult]:
    """Saved views by their names."""
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(sa.select(saved_views).order_by(saved_views.c.name)).mappings()]
