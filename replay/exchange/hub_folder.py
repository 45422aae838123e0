"""Rows as a folder that Hugging Face's hub takes as a dataset repository: a Parquet file, and a card about it."""

from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path

import sqlalchemy as sa
from jinja2 import Template

from replay.exchange import parquet
from replay.exchange.files import PARQUET, ExchangeError, is_parquet, opened, replaced
from replay.exchange.row_format import FORMAT
from replay.exchange.stored_rows import ExportReport, bundles, exportable
from replay.store import ReplayStore

ROWS = Path("data", "trajectories.parquet")
UNKNOWN = "unknown"
_ON_HUB = "hf:"


def export_folder(
    store: ReplayStore,
    folder: Path,
    *,
    where: sa.ColumnElement[bool] | None = None,
    limit: int | None = None,
    force: bool = False,
    license: str = UNKNOWN,
    labels: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Write the rows that `export_file` would write, with or without their labels, and a card about them. `license` is
    a name from the hub's list."""
    file, report = folder / ROWS, ExportReport()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"got {str(folder)!r} ({error.strerror})"
        raise ExchangeError(f"FOLDER must be writable, {reason}. Choose another.") from error
    with (
        store.naming_damage(),
        replaced(folder / "README.md", force=force) as card,
        replaced(file, force=force) as target,
    ):
        ids = exportable(store, report, sa.true() if where is None else where)[:limit]
        rows = bundles(store, ids, report, progress)
        kept = rows if labels else (replace(row, labels=(), run_labels=()) for row in rows)
        parquet.write(target, kept)
        text = resources.files("replay.exchange").joinpath("card.md").read_text(encoding="utf-8")
        template = Template(text, trim_blocks=True, keep_trailing_newline=True)
        about = {"license": license, "rows": report.rows, "format": FORMAT, "labels": labels}
        card.write_text(template.render(**about), encoding="utf-8")
    return report


def local_path(field: str, place: str) -> Path:
    """The path of a file or folder. Raises ExchangeError for a name on the hub: its own client moves folders."""
    if place.startswith(_ON_HUB):
        name = place.removeprefix(_ON_HUB).partition("@")[0]
        raise ExchangeError(
            f"{field} must be a file or folder here, got {place!r}. Copy it with the hub's client: hf upload {name} "
            f"FOLDER --repo-type dataset, or hf download {name} --repo-type dataset --local-dir FOLDER"
        )
    return Path(place)


def files_of(path: Path) -> list[Path]:
    """The file `path`, or the Parquet files in the folder `path` by name. Raises ExchangeError if one is unreadable."""
    files = sorted(path.rglob(f"*{PARQUET}")) if path.is_dir() else [path]
    if not files:
        raise ExchangeError(f"FOLDER must hold files in {PARQUET}, got none in {str(path)!r}. Check its name.")
    for file in files:
        is_parquet(file)
        with opened(file):
            pass
    return files
