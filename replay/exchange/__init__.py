"""Experience as files: lossless export and import in JSONL and Parquet, and other people's data."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from replay.exchange import jsonl, parquet
from replay.exchange.files import ExchangeError, is_parquet, replaced
from replay.exchange.importing import ImportReport, Placed, Progress, check_set_name, import_rows
from replay.exchange.json_text import BadRow
from replay.exchange.row_format import Bundle, Tools
from replay.exchange.stored_rows import ExportReport, bundles, exportable
from replay.store import ReplayStore

__all__ = ["ExchangeError", "ExportReport", "ImportReport", "export_file", "import_file"]


def export_file(
    store: ReplayStore,
    path: Path,
    *,
    where: sa.ColumnElement[bool] | None = None,
    force: bool = False,
    unique: bool = False,
    tools_of: Callable[[Bundle], Tools | None] = lambda row: row.tools,
    line_of: Callable[[Bundle], bytes] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Write rows to `path`, in the format of its ending. The file is written whole or not at all.

    Rows are ordered by run, iteration, slot and id. Orphaned, quarantined and evicted rows are left out and counted,
    even if they became so during the export. Rows stored during the export may be in the file or not. `unique` leaves
    out rows whose tokens are those of an earlier one. `tools_of` returns what a row's policy was offered. `line_of`
    writes each row as another kind of line, which no import reads.
    """
    as_parquet = is_parquet(path)
    if as_parquet and line_of is not None:
        raise ExchangeError(f"FILE must end in .jsonl or .jsonl.gz, got {str(path)!r}. Rename it.")
    report = ExportReport()
    with replaced(path, force=force) as target:
        ids = exportable(store, report, sa.true() if where is None else where)
        found = bundles(store, ids, report, progress, unique=unique)
        rows = (replace(row, tools=tools_of(row)) for row in found)
        parquet.write(target, rows) if as_parquet else jsonl.write(path, target, rows, line_of or jsonl.encode)
    return report


def import_file(
    store: ReplayStore,
    path: Path,
    *,
    name: str | None = "import",
    skip_bad: bool = False,
    progress: Progress = lambda phase, done: None,
) -> ImportReport:
    """Store the rows of an exported file with `name` as their source; None: every row keeps its own source."""
    if name is not None:
        check_set_name(name)
    report = ImportReport()
    import_rows(store, partial(_placed, path), report, source=name, skip_bad=skip_bad, progress=progress)
    return report


def _placed(path: Path) -> Iterator[Placed]:
    """Each row of a file with its place. If the file can't be read to its end, the error comes last."""
    reader, unit, number = (parquet.read, "row ", 0) if is_parquet(path) else (jsonl.read, "", 0)
    try:
        for number, row in enumerate(reader(path), 1):
            yield f"{path}:{unit}{number}", row
    except BadRow as error:
        yield f"{path}:{unit}{number + 1}", error
