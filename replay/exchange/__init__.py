"""Experience as files: lossless export and import, JSONL and Parquet, and other people's data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from replay.exchange import jsonl, parquet
from replay.exchange.files import ExchangeError, is_parquet, opened, replaced
from replay.exchange.importing import ImportReport, Placed, Progress, check_set_name, import_rows
from replay.exchange.row_format import BadRow, Bundle
from replay.exchange.stored_rows import NotExported, bundles, exportable
from replay.store import ReplayStore

__all__ = ["ExchangeError", "ExportReport", "ImportReport", "check_set_name", "export_file", "import_file"]


@dataclass(frozen=True)
class ExportReport:
    rows: int
    left: NotExported


def export_file(
    store: ReplayStore,
    path: Path,
    *,
    run: str | None = None,
    where: sa.ColumnElement[bool] | None = None,
    limit: int | None = None,
    force: bool = False,
    line_of: Callable[[Bundle], bytes] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Write rows to `path`, in the format of its ending; it is there whole or not at all.

    Rows stand in the order of run, iteration, slot and id. Orphaned, quarantined and evicted ones are left out and
    counted, also those that became so meanwhile; rows that are written meanwhile may be in the file or not.
    `limit` takes the first of those that `run` and `where` choose. `line_of` makes lines that no import reads.
    """
    as_parquet = is_parquet(path)
    if as_parquet and line_of is not None:
        raise ExchangeError(f"FILE must end in .jsonl or .jsonl.gz, got {str(path)!r}. Rename it.")
    left = NotExported()
    with store.naming_damage(), replaced(path, force=force) as target:
        ids = exportable(store, left, run=run, where=where)[:limit]
        rows = _counted(bundles(store, ids, left), lambda done: progress(done, len(ids)))
        count = parquet.write(target, rows) if as_parquet else jsonl.write(path, target, rows, line_of or jsonl.encode)
    return ExportReport(count, left)


def _counted(rows: Iterator[Bundle], progress: Callable[[int], None]) -> Iterator[Bundle]:
    for done, row in enumerate(rows, 1):
        yield row
        progress(done)


def import_file(
    store: ReplayStore,
    path: Path,
    *,
    name: str | None = "import",
    skip_bad: bool = False,
    progress: Progress = lambda phase, done: None,
) -> ImportReport:
    """Store the rows of an exported file, with `name` as their source; None: with the source each had.

    See `importing.import_rows` for what is refused.
    """
    if name is not None:
        check_set_name(name)
    reader = parquet.read if is_parquet(path) else jsonl.read
    unit = "row " if is_parquet(path) else ""
    with opened(path):
        report = ImportReport()
        rows = partial(_placed, path, reader, unit)
        import_rows(store, rows, report, source=name, skip_bad=skip_bad, progress=progress)
        return report


def _placed(path: Path, reader: Callable[[Path], Iterator[Bundle | BadRow]], unit: str) -> Iterator[Placed]:
    """Each row with where it stands; what ends the reading early is the last of them."""
    number = 0
    try:
        for number, row in enumerate(reader(path), 1):
            yield f"{path}:{unit}{number}", row
    except BadRow as error:
        yield f"{path}:{unit}{number + 1}", error
