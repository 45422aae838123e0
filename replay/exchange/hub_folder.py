"""Rows as a folder that is a dataset repository of Hugging Face's hub: Parquet, and a card that says what is in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import yaml

from context.wording import excerpt, visible
from replay.exchange import parquet
from replay.exchange.files import PARQUET, ExchangeError, is_parquet, opened, replaced
from replay.exchange.row_format import FORMAT, Bundle
from replay.exchange.stored_rows import ExportReport, bundles, exportable
from replay.records import stored_setting
from replay.store import ReplayStore

ROWS = Path("data", "trajectories.parquet")
_CARD = "README.md"
_UNKNOWN = "unknown"
_NO_LICENSE = "Nobody has said under which license these rows may be used.\n\n"
_TEXT = """---
{head}---

# Trajectories of tool-using agents

| | |
|---|---|
{table}

{note}A row is a trajectory: its messages, its tokens, who wrote each of them, and the log-probs they were sampled with
(format {format} of agentloop). The configuration of its run is in it, with paths of the machine that it ran on.
"""


def export_folder(
    store: ReplayStore,
    folder: Path,
    *,
    where: sa.ColumnElement[bool] | None = None,
    limit: int | None = None,
    force: bool = False,
    license: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Write the rows that `export_file` would to the folder's Parquet file, and the card of what was written.

    `license` is an identifier of the hub's list; None: nobody has said what may be done with the rows.
    """
    try:
        (folder / ROWS).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExchangeError(
            f"FOLDER must be writable, got {str(folder)!r} ({error.strerror}). Choose another."
        ) from error
    report, contents = ExportReport(), _Contents()
    with (
        store.naming_damage(),
        replaced(folder / _CARD, force=force) as card,
        replaced(folder / ROWS, force=force) as target,
    ):
        ids = exportable(store, report, sa.true() if where is None else where)[:limit]
        parquet.write(target, contents.counted(bundles(store, ids, report, progress)))
        card.write_text(contents.card(license or _UNKNOWN), encoding="utf-8")
    return report


def files_of(path: Path) -> list[Path]:
    """The files of rows that `path` is or has, in the order of their names; ExchangeError where one can't be read."""
    files = sorted(path.rglob(f"*{PARQUET}")) if path.is_dir() else [path]
    if not files:
        raise ExchangeError(f"FOLDER must hold files in {PARQUET}, got none in {str(path)!r}. Check it.")
    for file in files:
        is_parquet(file)
        with opened(file):
            pass
    return files


@dataclass
class _Contents:
    """What the card says of the rows, counted as they are written."""

    rows: int = 0
    successes: int = 0
    tokens: int = 0
    action_tokens: int = 0
    tasks: set[str] = field(default_factory=set)
    named: dict[str, Counter[str]] = field(default_factory=dict)
    """Rows by what the card names, as models and environments, and by its name."""

    def counted(self, rows: Iterable[Bundle]) -> Iterator[Bundle]:
        for row in rows:
            record, made_with = row.trajectory.record, row.run.fingerprint or {}
            tokenizer = next((policy.tokenizer_hash for policy in row.policies), _UNKNOWN)
            self.rows += 1
            self.successes += record.success
            self.tokens += record.num_tokens
            self.action_tokens += record.num_action_tokens
            self.tasks.add(record.task)
            names = {
                "model": f"{_model(row.run.config)} ({made_with.get('model_family', _UNKNOWN)})",
                "tokenizer (sha256)": str(made_with.get("tokenizer", tokenizer)),
                "environment": f"{record.environment} {record.environment_version}".strip() or _UNKNOWN,
                "source": record.source,
            }
            for kind, name in names.items():
                self.named.setdefault(kind, Counter())[name] += 1
            yield row

    def card(self, license: str) -> str:
        split = {"split": "train", "path": f"{ROWS.parent}/*{PARQUET}"}
        head = {
            "license": license,
            "tags": ["agentloop", "trajectories", "reinforcement-learning"],
            "configs": [{"config_name": "default", "data_files": [split]}],
        }
        counts = {
            "trajectories": f"{self.rows:,}",
            "tasks": f"{len(self.tasks):,}",
            "successes": f"{self.successes:,}",
            "tokens": f"{self.tokens:,}, {self.action_tokens:,} of them sampled",
        }
        named = {kind: ", ".join(map(_quoted, sorted(found))) for kind, found in self.named.items()}
        table = [f"| {name} | {value} |" for name, value in {**counts, **named, "license": _quoted(license)}.items()]
        note = _NO_LICENSE if license == _UNKNOWN else ""
        return _TEXT.format(
            head=yaml.safe_dump(head, sort_keys=False), table="\n".join(table), note=note, format=FORMAT
        )


def _model(config: Mapping[str, Any]) -> str:
    """A folder is named by its last part: where it lay says nothing elsewhere."""
    if "model" not in config:
        return _UNKNOWN
    path = stored_setting(config, "model.path", str)
    return "built-in" if path is None else Path(path).name if Path(path).is_absolute() else path


def _quoted(text: str) -> str:
    """As code, so that no name becomes a link or breaks the table."""
    return f"`{visible(excerpt(text, 100)).replace('`', ' ').replace('|', ' ')}`"
