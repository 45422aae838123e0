"""A second buffer as a source of draws: its rows are copied into the own one, which is then all that a draw reads.

A copy, because a draw is on record with its trajectory, and both have to be in one database to stay true.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import reduce
from operator import or_
from pathlib import Path

from replay.exchange.files import ExchangeError
from replay.exchange.importing import ImportReport, Placed, Progress, import_rows
from replay.exchange.stored_rows import ExportReport, bundles, exportable, known_runs
from replay.locate import DATABASE
from replay.locate import place as located
from replay.records import ELIGIBLE
from replay.sampling.compatibility import bits, meanings, names_of
from replay.storage.format.schema import trajectories
from replay.store import ReplayStore


def check_attachable(place: str) -> None:
    """Raises ReplayError where no buffer can be opened."""
    with closing(ReplayStore.open(located(place)[0], read_only=True)):
        pass


def attach(
    store: ReplayStore,
    run: str,
    name: str,
    place: str,
    *,
    allow_mismatch: Sequence[str] = (),
    progress: Progress = lambda phase, done: None,
) -> ImportReport:
    """Copy the rows that `run` may draw, with `name` as their source; those copied before stay as they are.

    These are the eligible ones of runs with the same authors, tokenizer, template and model family, but for what
    `allow_mismatch` names. The other buffer is only read, and what it gets later is not seen.
    """
    with closing(ReplayStore.open(located(place)[0], read_only=True)) as other:
        if other.url == store.url:
            raise ExchangeError(f"replay.attach.{name} must be another buffer, got the run's own. Leave it out.")
        with store.reading() as connection:
            mine = meanings(connection, [run])[run]
        with other.reading() as connection:
            others = meanings(connection, [id for id in known_runs(connection) if id != run])
        allowed = bits(tuple(allow_mismatch))
        differing = {id: theirs.mismatch(mine) & ~allowed for id, theirs in others.items()}
        comparable = [id for id, mismatch in differing.items() if not mismatch]
        # The run's own rows may be there too, in a database that both once shared.
        where = (trajectories.c.state == ELIGIBLE) & trajectories.c.run.in_(comparable)
        read = ExportReport()
        ids = exportable(other, read, where)

        def rows() -> Iterator[Placed]:
            return ((f"{name}:{bundle.trajectory.id}", bundle) for bundle in bundles(other, ids, read))

        if not ids:
            names = ", ".join(names_of(reduce(or_, differing.values(), 0)))
            raise ExchangeError(
                f"replay.attach.{name} must hold rows that this run can learn from, got none in {other.url}"
                + (f" but of another {names}" if names else "")
                + ". Leave it out, attach another, or name what may differ in replay.allow_mismatch."
            )
        report = ImportReport()
        import_rows(store, rows, report, source=name, progress=progress)
    report.problems += [f"{name}:{id}: {reason}" for id, reason in read.corrupt.items()]
    report.bad = len(read.corrupt)
    return report


@contextmanager
def copy_with(
    store: ReplayStore, run: str, places: Mapping[str, str], *, allow_mismatch: Sequence[str] = ()
) -> Iterator[ReplayStore]:
    """The buffer as it will be once `run` has attached these others: a copy, for as long as it is looked at."""
    if store.path is None:
        named = ", ".join(places)
        raise ExchangeError(
            f"replay.attach must hold what {store.url} has already, got {named}: a server's database is not copied to "
            "look at it. Leave it out, or attach it by starting the run."
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / DATABASE
        with store.reading() as connection, closing(sqlite3.connect(file)) as target:
            source = connection.connection.driver_connection
            assert isinstance(source, sqlite3.Connection)
            source.backup(target)
        with closing(ReplayStore.open(file)) as copy:
            for name, place in places.items():
                attach(copy, run, name, place, allow_mismatch=allow_mismatch)
            yield copy
