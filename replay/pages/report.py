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
from typing import Any, NamedTuple

from markupsafe import Markup

from replay.pages.panels import DEMONSTRATIONS, FAMILIES, Config, number, panel_groups, plain_groups
from replay.pages.templating import environment
from replay.questions import QueryResult, merging, metric_series
from replay.questions.diagnosis import regime
from replay.questions.runs import ALL, Metrics, Series, finite, newest_logged
from replay.records import RunRecord
from replay.records import stored_setting as stored
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
    **{f"sft_{name}": f"sft/{name}" for name in ("loss", "held_out_loss", "grad_norm")},
}
"""The metric of each column of the table of iterations."""


def write_report(store: ReplayStore, path: Path, *, run: str | None = None, config_text: str) -> Path:
    """Save the page of `run`, or of the only one, at `path`, in place of an older one. `config_text`: for people."""
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
    """Tiles, panels and newest iterations of a run; a point of a curve is `merged` iterations, of a stretch fewer."""
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
        "is_sft": DEMONSTRATIONS in groups,
        "iterations": _newest(store, run.id),
    }


def _newest(store: ReplayStore, run: str) -> list[QueryResult]:
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


def _static(name: str) -> str:
    return files("replay.pages").joinpath("static", name).read_text(encoding="utf-8")


def _script() -> str:
    """The scripts of the page as one, which no other file has to be fetched for."""
    lines = "\n".join(map(_static, _SCRIPTS))
    return re.sub(r"^export ", "", re.sub(r"^import .*\n", "", lines, flags=re.M), flags=re.M)


class Tile(NamedTuple):
    name: str
    words: tuple[tuple[str, str], ...]
    """Each with its class: `plain`, `unit`, `arrow`, or `rising` where a number rose."""
    note: str
    hero: bool = False
    streams: tuple[float, float] | None = None
    """Fresh and replayed, drawn as a bar."""


def tiles(metrics: Metrics, config: Config) -> tuple[Tile, ...]:
    """Held-out success, training time, the trajectories that fed updates, and what limits the run; of one of sft,
    held-out loss and training time."""
    found = regime(metrics, config)
    limited = () if found is None else (Tile("limited by", _plain(found.limit), found.text),)
    first, seconds, rows = _success(metrics), _time(metrics, stored(config, "run.iterations", int)), _rows(metrics)
    loss = finite(metrics, "sft/held_out_loss")
    return (_held_out_loss(loss), seconds) if loss else (first, seconds, rows, *limited)


def _plain(text: str) -> tuple[tuple[str, str], ...]:
    return ((text, "plain"),)


def duration(seconds: float) -> str:
    """`48 s`, `1 min 48 s`, `3 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _success(metrics: Metrics) -> Tile:
    name, held_out = "held-out success", finite(metrics, "eval/success")
    if not held_out:
        return Tile(name, _plain("not measured"), "No evaluation was made in this run.", hero=True)
    (first, start), (last, end) = held_out[0], held_out[-1]
    if len(held_out) == 1:
        return Tile(name, _plain(_percent(start)), f"at iteration {first:,}, evaluated once", hero=True)
    words = ((_percent(start), "plain"), ("\u2192", "arrow"), (_percent(end), "rising" if end > start else "plain"))
    return Tile(name, words, f"from iteration {first:,} to {last:,}, on tasks never trained on", hero=True)


def _held_out_loss(loss: Series) -> Tile:
    (first, start), (last, end) = loss[0], loss[-1]
    words = ((f"{start:.3f}", "plain"), ("\u2192", "arrow"), (f"{end:.3f}", "plain"))
    note = f"nats per trained token, from update {first:,} to {last:,}, on demonstrations never trained on"
    return Tile("held-out loss", words, note, hero=True)


def _time(metrics: Metrics, limit: int | None) -> Tile:
    seconds = [value for _, value in finite(metrics, "time/iteration")]
    if not seconds:
        return Tile("training time", _plain("not measured"), "No iteration was finished.")
    of_limit = f" of at most {limit:,}" if limit is not None and len(seconds) < limit else ""
    each = duration(sum(seconds) / len(seconds))
    note = f"{len(seconds):,}{of_limit} iterations, {each} each, evaluations not counted"
    return Tile("training time", _plain(duration(sum(seconds))), note)


def _rows(metrics: Metrics) -> Tile:
    def total(name: str) -> float:
        return sum(value for _, value in finite(metrics, f"batch/{name}"))

    name, fresh, replay = "trajectories in batches", total("fresh"), total("replay")
    if not fresh + replay:
        return Tile(name, _plain("none"), "No iteration was finished.")
    words = ((f"{fresh:,.0f}", "plain"), ("fresh", "unit"), (f"+ {replay:,.0f}", "plain"), ("replayed", "unit"))
    shares = (_percent(part / (fresh + replay)) for part in (replay, total("planned_replay")))
    return Tile(name, words, "{} from the buffer, configured {}".format(*shares), streams=(fresh, replay))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def setting(config: Config) -> str:
    """What makes this run this run, in one line."""
    seed, target = stored(config, "run.seed", int), stored(config, "run.stop_at_success", float)
    environment, data = stored(config, "environment.name", str), stored(config, "sft.data", str)
    learned = f"{data}, from {stored(config, 'model.path', str) or 'a new built-in model'}" if data else None
    parts = [
        environment or learned,
        None if seed is None else f"seed {seed}",
        _replay(config),
        None if target is None else f"ends at {number(target, percent=True)} held-out success twice in a row",
    ]
    return " \u00b7 ".join(part for part in parts if part).replace(" %", "\u00a0%")


def _replay(config: Config) -> str | None:
    fraction, sampler = stored(config, "replay.fraction", float), stored(config, "replay.sampler", str)
    if fraction is None:
        return None
    if not (fraction or stored(config, "replay.schedule.final", float)):
        return "no replay"
    words = f"replay {number(fraction, percent=True)}" + (f", {sampler} sampler" if sampler else "")
    return words + (", observed only" if stored(config, "replay.mode", str) == "observe" else "")


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
