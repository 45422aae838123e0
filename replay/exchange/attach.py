"""Attached sources: rows of another buffer or of a file, copied into the run's own buffer to be drawn from there.

They are copied because a stored draw names its trajectory: both must be in one database.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from replay.exchange import import_file
from replay.exchange.files import JSONL, PARQUET, ExchangeError, is_parquet, lines, opened
from replay.exchange.importing import ImportReport, Placed, Progress, import_rows
from replay.exchange.json_text import BadRow, json_line
from replay.exchange.stored_rows import ExportReport, bundles, exportable, known_runs
from replay.exchange.teacher import Teaching, import_chat
from replay.locate import place as located
from replay.records import ELIGIBLE
from replay.sampling.compatibility import difference_bits, difference_names, read_token_meanings
from replay.storage.format.schema import trajectories
from replay.store import ReplayStore

Teach = Callable[..., Teaching]
"""Makes the `Teaching` of the run that learns, from a `reward` and an `advantage`."""


def check_attachable(place: str) -> None:
    """Raises ReplayError if `place` is neither a buffer that can be opened nor a file of rows that can be read."""
    if (file := _file_of_rows(place)) is not None:
        with opened(file):
            return
    with closing(ReplayStore.open(located(place)[0], read_only=True)):
        pass


def attach(
    store: ReplayStore,
    run: str,
    name: str,
    place: str,
    *,
    teach: Teach,
    allow_mismatch: Sequence[str] = (),
    progress: Progress = lambda phase, done: None,
) -> ImportReport:
    """Copy the rows that `run` may draw, with `name` as their source. Rows copied before stay as they are.

    From another buffer, eligible rows are copied if their run has the same authors, tokenizer, template and model
    family; `allow_mismatch` names exceptions. The other buffer is only read, and its later rows are not copied. A file
    of rows or of conversations is imported whole.
    """
    if (file := _file_of_rows(place)) is not None:
        return _import(store, name, file, teach, progress)
    with closing(ReplayStore.open(located(place)[0], read_only=True)) as other:
        if other.url == store.url:
            raise ExchangeError(f"replay.attach.{name} must be another buffer, got the run's own. Leave it out.")
        with store.reading() as connection:
            mine = read_token_meanings(connection, [run])[run]
        with other.reading() as connection:
            others = read_token_meanings(connection, [id for id in known_runs(connection) if id != run])
        allowed = difference_bits(tuple(allow_mismatch))
        differing = {id: theirs.mismatch(mine) & ~allowed for id, theirs in others.items()}
        comparable = [id for id, mismatch in differing.items() if not mismatch]
        # The run's own rows may be there too, if both once shared a database.
        where = (trajectories.c.state == ELIGIBLE) & trajectories.c.run.in_(comparable)
        read = ExportReport()
        ids = exportable(other, read, where)

        def rows() -> Iterator[Placed]:
            return ((f"{name}:{bundle.trajectory.id}", bundle) for bundle in bundles(other, ids, read))

        if not ids:
            names = ", ".join(difference_names(reduce(or_, differing.values(), 0)))
            raise ExchangeError(
                f"replay.attach.{name} must hold rows that this run can learn from, got none in {other.url}"
                + (f" but of another {names}" if names else "")
                + ". Leave it out, attach another buffer, or name what may differ in replay.allow_mismatch."
            )
        report = ImportReport()
        import_rows(store, rows, report, source=name, progress=progress)
    report.problems += [f"{name}:{id}: {reason}" for id, reason in read.corrupt.items()]
    report.bad = len(read.corrupt)
    return report


def _file_of_rows(place: str) -> Path | None:
    """The file that `place` names; None: `place` is a buffer."""
    return Path(place) if place.lower().endswith((PARQUET, *JSONL)) else None


def _import(store: ReplayStore, name: str, file: Path, teach: Teach, progress: Progress) -> ImportReport:
    """Import a file of exported rows or of conversations. Exported rows name their format.

    Either every conversation of a file has a reward, or none has: the import refuses the others. Conversations without
    rewards are demonstrations: each is a success with advantage 1.
    """
    if is_parquet(file) or "format" in next(_rows(file), {}):
        return import_file(store, file, name=name, progress=progress)
    own = None if any(row.get("reward") is not None for row in _rows(file)) else 1.0
    return import_chat(store, file, teach(reward=own, advantage=own), name=name, progress=progress)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the readable lines of a file. The import reports the other lines."""
    with suppress(BadRow):  # a damaged file ends here
        for line in lines(file):
            with suppress(BadRow):
                if isinstance(row := json_line(line), dict):
                    yield row
