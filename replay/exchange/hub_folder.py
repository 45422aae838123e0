"""Rows as a folder that Hugging Face's hub takes as a dataset repository: a Parquet file, and a card about it."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from jinja2 import Template

from context.wording import excerpt, visible
from replay.exchange import parquet
from replay.exchange.files import PARQUET, ExchangeError, is_parquet, opened, replaced
from replay.exchange.row_format import FORMAT, Bundle
from replay.exchange.stored_rows import ExportReport, bundles, exportable
from replay.records import stored_setting
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
    file, report, contents = folder / ROWS, ExportReport(), _Contents()
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
        parquet.write(target, contents.counted(kept))
        card.write_text(contents.card(license, labels=labels), encoding="utf-8")
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


class _Contents:
    """The card's facts about the rows, counted while the rows are written."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        self._tasks: set[str] = set()

    def counted(self, rows: Iterable[Bundle]) -> Iterator[Bundle]:
        for row in rows:
            record, made_with = row.trajectory.record, row.run.fingerprint or {}
            totals = {"trajectories": 1, "successes": int(record.success), "tokens": record.num_tokens}
            self._totals.update(totals | {"sampled tokens": record.num_action_tokens})
            self._tasks.add(record.task)
            self._names["model"].add(f"{_model(row.run.config)} ({made_with.get('model_family', UNKNOWN)})")
            self._names["tokenizer (sha256)"] |= {policy.tokenizer_hash for policy in row.policies}
            self._names["environment"].add(f"{record.environment} {record.environment_version}")
            self._names["source"].add(record.source)
            yield row

    def card(self, license: str, *, labels: bool) -> str:
        text = resources.files("replay.exchange").joinpath("card.md").read_text(encoding="utf-8")
        template = Template(text, trim_blocks=True, keep_trailing_newline=True)
        totals = {**self._totals, "tasks": len(self._tasks)}
        names = {name: map(_quoted, sorted(found)) for name, found in self._names.items()}
        return str(template.render(license=license, totals=totals, names=names, format=FORMAT, labels=labels))


def _model(config: Mapping[str, Any]) -> str:
    """The name of a run's model. Of an absolute path only the last part is shown."""
    path = stored_setting(config, "model.path", str) or ("built-in" if "model" in config else UNKNOWN)
    return Path(path).name if Path(path).is_absolute() else path


def _quoted(text: str) -> str:
    """A name as inline code, so that it neither becomes a link nor breaks the table."""
    return f"`{visible(excerpt(text, 100)).replace('`', ' ').replace('|', ' ')}`"
