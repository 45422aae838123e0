"""Which labels there are, and the lists that somebody named."""

import sqlalchemy as sa

from replay.questions.filters.query import QueryResult, run_is
from replay.storage.format.schema import run_labels, saved_views, trajectories, trajectory_labels
from replay.storage.labels import labels_of
from replay.store import ReplayStore


def label_counts(store: ReplayStore, run: str | None = None) -> list[QueryResult]:
    """Each label of a run and of its trajectories, or of all, and how many have it."""
    mine, of, count = trajectory_labels.c, run_labels.c, sa.func.count()
    rows = sa.select(mine.label, count).join(trajectories).where(run_is(run, trajectories.c.run)).group_by(mine.label)
    of_runs = sa.select(of.label, count).where(run_is(run, of.run)).group_by(of.label)
    with store.reading() as connection:
        found = [{row[0]: int(row[1]) for row in connection.execute(query)} for query in (rows, of_runs)]
    names = sorted({*found[0], *found[1]})
    return [{"label": name, "trajectories": found[0].get(name, 0), "runs": found[1].get(name, 0)} for name in names]


def run_labels_of(store: ReplayStore, run: str) -> list[QueryResult]:
    with store.reading() as connection:
        return [vars(label) for label in labels_of(connection, [run], "run").get(run, ())]


def views(store: ReplayStore) -> list[QueryResult]:
    """Saved views by their names."""
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(sa.select(saved_views).order_by(saved_views.c.name)).mappings()]
