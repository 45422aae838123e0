"""What a run's page shows, and the page saved as one file (`report.html`), which needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from replay.pages.charts import Config, plain_groups
from replay.pages.panels import FAMILIES, panel_groups
from replay.pages.run_facts import setting, tiles
from replay.pages.templating import environment
from replay.questions import QueryResult, merging, metric_series
from replay.questions.runs import ALL, Metrics, Series, newest_logged
from replay.records import RunRecord
from replay.store import ReplayStore

REPORT_NAME = "report.html"
_STYLES = ("style.css", "vendor/uPlot.min.css", "charts.css", "run.css")
_SCRIPTS = ("vendor/uPlot.iife.min.js", "scales.js", "charts.js")
_RECENT = 12
COLUMNS: Mapping[str, str] = {
    "fresh": "batch/fresh",
    "replay": "batch/replay",
    "success": "rollout/success",
    "held_out": "eval/success",
    "reward": "rollout/reward",
    "pg_loss_fresh": "actor/fresh/pg_loss",
    "pg_loss_replay": "actor/replay/pg_loss",
    "ess_replay": "actor/replay/ess",
    "clip_fraction_replay": "actor/replay/pg_clipfrac",
    "staleness": "replay/staleness_mean",
    "seconds": "time/iteration",
}
"""The metric of each column of the table of iterations."""


def write_report(store: ReplayStore, path: Path, *, run: str | None = None, config_text: str) -> Path:
    """Save the page of `run`, or of the only one in `store`, at `path`; an older one is replaced whole.

    `config_text` is the configuration as people read it.
    """
    script, style = _script(), "\n".join(map(_static, _STYLES))
    page = environment().get_template("run.html")
    text = page.render(
        **run_contents(store, store.run(run)),
        saved=True,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        config_text=config_text,
        iteration_link=None,
    )
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(text.encode("utf-8", "replace"))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def run_contents(store: ReplayStore, run: RunRecord, within: range = ALL) -> QueryResult:
    """Tiles, panels and newest iterations of a run.

    Each point of a long run's curves is `merged` iterations; of a stretch `within` they are fewer.
    """
    merged = merging(store, [run.id], within)
    groups = panel_groups(panel_series(store, run.id, merged, within), run.config)
    return {
        "run": run.id,
        "name": run.name,
        "code_version": run.code_version,
        "merged": merged,
        "setting": setting(run.config),
        "tiles": tiles(tile_series(store, run.id), run.config),
        **plain_groups(groups, merged=merged),
        "iterations": _newest(store, run.id),
    }


def _newest(store: ReplayStore, run: str) -> list[QueryResult]:
    """The newest iterations, the newest first."""
    last = newest_logged(store, run)
    metrics = metric_series(store, run, names=tuple(COLUMNS.values()), within=range(max(0, last - _RECENT), last + 1))
    values = {column: dict(metrics.get(name, ())) for column, name in COLUMNS.items()}
    return [
        {"iteration": iteration, **{column: known.get(iteration) for column, known in values.items()}}
        for iteration in sorted(values["seconds"], reverse=True)[:_RECENT]
    ]


def panel_series(store: ReplayStore, run: str, merged: int, within: range = ALL) -> Metrics:
    """The metrics of the panels, `merged` iterations to a point."""
    names = _names_read(panel_groups)
    return metric_series(store, run, names=names, families=FAMILIES, within=within, merged=merged)


def tile_series(store: ReplayStore, run: str) -> Metrics:
    """The metrics of the tiles, of every iteration."""
    return metric_series(store, run, names=_names_read(tiles))


class _Recording(dict[str, Series]):
    """Metrics of one point each that note which ones are read: a key of this dictionary."""

    def get(self, key: str, default: object = None) -> Series:
        self[key] = ((1, 1.0),)
        return self[key]


@cache
def _names_read(made: Callable[[Metrics, Config], Any]) -> tuple[str, ...]:
    """The metrics that panels or tiles are made from."""
    recording = _Recording()
    made(recording, {})
    return tuple(sorted(recording))


def _static(name: str) -> str:
    return files("replay.pages").joinpath("static", name).read_text(encoding="utf-8")


def _script() -> str:
    """The scripts of the page as one, which no other file has to be fetched for."""
    lines = "\n".join(map(_static, _SCRIPTS))
    return re.sub(r"^export ", "", re.sub(r"^import .*\n", "", lines, flags=re.M), flags=re.M)
