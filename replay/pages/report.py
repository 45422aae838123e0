"""The contents of a run's page, and the report: the page as one file that needs no server and no network."""

import base64
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from markupsafe import Markup

from context.wording import share
from replay.diagnosis import regime
from replay.pages.panels import DEMONSTRATIONS, FAMILIES, OVERVIEW, Config, number, panel_groups, plain_groups
from replay.pages.templating import environment
from replay.questions import QueryResult
from replay.questions.runs import ALL, Metrics, Series, finite, merged_to, newest_known, progress
from replay.questions.table_series import FLAT_GROUPS, GROUPS, run_series
from replay.records import RunRecord
from replay.records import stored_setting as stored
from replay.store import ReplayStore

REPORT_NAME = "report.html"
_STYLES = ("style.css", "vendor/uPlot.min.css", "charts.css", "run.css")
_SCRIPTS = ("vendor/uPlot.iife.min.js", "scales.js", "charts.js")
_RECENT = 12
_NEWEST = 8
"""Number of newest iterations whose mean describes the present."""
_BY_SOURCE = "batch/source/"
LEARNING, SOURCES, COST = OVERVIEW
_NO_ITERATION = "This database holds no finished iteration of the run."
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
"""The metric of each column in the table of iterations."""


def write_report(store: ReplayStore, path: Path, *, run: str | None = None, config_text: str) -> Path:
    """Save the page of a run (None: the only one) at `path`. It shows `config_text` as the configuration."""
    script, style = _script(), "\n".join(map(_static, _STYLES))
    page, record = environment().get_template("run.html"), store.run(run)
    text = page.render(
        **run_contents(store, record),
        progress=progress(store, record),
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
    """Return the tiles, panels and newest iterations of a run. Curves show the iterations `within` in merged points."""
    merged = merged_to(min(within.stop - 1, newest_known(store, run.id)) - max(1, within.start) + 1)
    tiled = tile_series(store, run.id)
    series = panel_series(store, run.id, merged, within, tiled)
    groups = panel_groups(series, run.config)
    return {
        "run": run.id,
        "name": run.name,
        "code_version": run.code_version,
        "merged": merged,
        "setting": setting(run.config),
        "tiles": tiles(tiled, run.config),
        **plain_groups(groups, merged=merged, replayed=any(count for _, count in series.get("batch/replay", ()))),
        "overview": [question for question in OVERVIEW if question in groups],
        "is_sft": DEMONSTRATIONS in groups,
        "has_settings": not {"replay", "sft"}.isdisjoint(run.config),
        "iterations": _newest(store, run.id),
    }


def _newest(store: ReplayStore, run: str) -> list[QueryResult]:
    last = newest_known(store, run)
    metrics = run_series(store, run, names=tuple(COLUMNS.values()), within=range(max(0, last - _RECENT), last + 1))
    values = {column: dict(metrics.get(name, ())) for column, name in COLUMNS.items()}
    return [
        {"iteration": iteration, **{column: known.get(iteration) for column, known in values.items()}}
        for iteration in sorted(values["fresh"].keys() | values["seconds"].keys(), reverse=True)[:_RECENT]
    ]


def panel_series(
    store: ReplayStore, run: str, merged: int, within: range = ALL, known: Metrics = MappingProxyType({})
) -> Metrics:
    """Read the series of the panels; those of the tiles are `known`. A point merges `merged` iterations."""
    names = _find_names_read(panel_groups)
    return run_series(store, run, names=names, families=FAMILIES, within=within, merged=merged, known=known)


def tile_series(store: ReplayStore, run: str) -> Metrics:
    """Read the series of the tiles, with a point for every iteration."""
    return run_series(store, run, names=_find_names_read(tiles), families=(_BY_SOURCE,))


def _static(name: str) -> str:
    return files("replay.pages").joinpath("static", name).read_text(encoding="utf-8")


def _script() -> str:
    """Return the scripts of the page joined to one, so that the report needs no other file."""
    lines = "\n".join(map(_static, _SCRIPTS))
    return re.sub(r"^export ", "", re.sub(r"^import .*\n", "", lines, flags=re.M), flags=re.M)


class Tile(NamedTuple):
    """A short answer in large type, with a note and further facts."""

    name: str
    words: tuple[tuple[str, str], ...]
    """Each word with its class: `plain`, `unit`, `arrow`, or `rising` for a number that rose."""
    note: str
    facts: Sequence[tuple[str, str]] = ()
    """Further numbers, each with its name."""
    is_wide: bool = False
    streams: tuple[float, float] | None = None
    """Numbers of fresh and replayed rows, drawn as a bar."""


def tiles(metrics: Metrics, config: Config) -> tuple[Tile, ...]:
    """Make the tiles that answer the questions of `OVERVIEW`, and the tile that names the run's limit.

    A run of sft has tiles for its loss and its cost. Only a run with a configuration can follow advice about its limit.
    """
    found = regime(metrics, config) if config else None
    limited = () if found is None else (Tile("limited by", _plain(found.limit), found.text, is_wide=True),)
    loss, learning, rows = _loss(metrics), _success(metrics), _rows(metrics)
    cost = _cost(metrics, stored(config, "run.iterations", int), unit="update" if loss else "iteration")
    return (loss, cost) if loss else (learning, rows, cost, *limited)


def _plain(text: str) -> tuple[tuple[str, str], ...]:
    return ((text, "plain"),)


def duration(seconds: float) -> str:
    """Write seconds as `48 s`, `1 min 48 s` or `3 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _newest_mean(series: Series) -> float:
    return fmean(value for _, value in series[-_NEWEST:])


def _success(metrics: Metrics) -> Tile:
    held_out, tasks = finite(metrics, "eval/success"), finite(metrics, "eval/tasks")
    training, reward = finite(metrics, "rollout/success"), finite(metrics, "rollout/reward")
    last = f" (newest {min(_NEWEST, len(training))} iterations)" if len(training) > 1 else ""
    what = "training" if finite(metrics, "batch/fresh") else "collected"
    facts = [(f"{what} success", share(_newest_mean(training), 1) + last)] if training else []
    if reward:
        facts.append((f"{what} reward", number(_newest_mean(reward)) + last))
    if not held_out:
        return Tile(LEARNING, _plain("not measured"), "This database holds no evaluation of the run.", facts)
    on = f"held-out success, on {tasks[-1][1]:,.0f} tasks never trained on" if tasks else "held-out success"
    (first, start), (last_at, end) = held_out[0], held_out[-1]
    if len(held_out) == 1:
        return Tile(LEARNING, _plain(share(start, 1)), f"{on}, at iteration {first:,}, evaluated once", facts)
    best, at = max((value, iteration) for iteration, value in held_out)
    facts.insert(0, ("best", "the newest" if best == end else f"{share(best, 1)} at iteration {at:,}"))
    words = ((share(start, 1), "plain"), ("\u2192", "arrow"), (share(end, 1), "rising" if end > start else "plain"))
    return Tile(LEARNING, words, f"{on}, from iteration {first:,} to {last_at:,}", facts)


def _loss(metrics: Metrics) -> Tile | None:
    """Make the tile of a run of sft, if it is one: its held-out loss, or else its training loss."""
    held_out, training = finite(metrics, "sft/held_out_loss"), finite(metrics, "sft/loss")
    if not (loss := held_out or training):
        return None
    (first, start), (last, end) = loss[0], loss[-1]
    words = ((f"{start:.3f}", "plain"), ("\u2192", "arrow"), (f"{end:.3f}", "plain"))
    on = "held-out loss, nats per trained token of demonstrations never trained on"
    on = on if held_out else "training loss, nats per trained token; no demonstrations were held out"
    return Tile(LEARNING, words, f"{on}, from update {first:,} to {last:,}")


def _cost(metrics: Metrics, limit: int | None, *, unit: str) -> Tile:
    seconds, rates = finite(metrics, "time/iteration"), dict(finite(metrics, "speed/tokens_per_second"))
    if not seconds:
        made = len(finite(metrics, "batch/fresh"))
        note = f"{made:,} {unit}s were made; no time/iteration was logged." if made else _NO_ITERATION
        return Tile(COST, _plain("not measured"), note)
    total = sum(value for _, value in seconds)
    of_limit = f" of at most {limit:,}" if limit is not None and len(seconds) < limit else ""
    note = f"training time {duration(total)}, {len(seconds):,}{of_limit} {unit}s, evaluations not counted"
    facts = []
    for part in ("collect", "update"):
        if spent := sum(value for _, value in finite(metrics, f"time/{part}")):
            facts.append((part, f"{duration(spent / len(seconds))}, {share(spent, total)}"))
    if evaluations := [value for _, value in finite(metrics, "time/evaluation")]:
        facts.append(("evaluation", f"{duration(fmean(evaluations))} each, {len(evaluations):,} made"))
    if tokens := sum(rates.get(at, 0.0) * value for at, value in seconds):
        facts.append(("tokens in batches", f"{tokens:,.0f}, {tokens / total:,.0f} per second"))
    if memory := finite(metrics, "actor/peak_memory_gb"):
        facts.append(("peak memory", f"{max(value for _, value in memory):.3g} GB on the GPU"))
    each = duration(total / len(seconds))
    return Tile(COST, ((each, "plain"), (f"per {unit}", "unit")), note, facts)


def _rows(metrics: Metrics) -> Tile:
    def total(name: str) -> float:
        return sum(value for _, value in finite(metrics, f"batch/{name}"))

    fresh, replay, facts = total("fresh"), total("replay"), _buffer(metrics)
    if not fresh + replay:
        return Tile(SOURCES, _plain("none"), _NO_ITERATION, facts)
    words = ((f"{fresh:,.0f}", "plain"), ("fresh", "unit"), (f"+ {replay:,.0f}", "plain"), ("replayed", "unit"))
    planned = total("planned_fresh") + total("planned_replay")
    configured = f", configured {share(total('planned_replay'), planned)}" if planned else ""
    sources = {name: total(name.removeprefix("batch/")) for name in sorted(metrics) if name.startswith(_BY_SOURCE)}
    counts = ", ".join(f"{name.removeprefix(_BY_SOURCE)} {count:,.0f}" for name, count in sources.items())
    facts = [*([("replayed by source", counts)] if sources else []), *facts]
    note = f"trajectories in batches, {share(replay, fresh + replay)} from the buffer{configured}"
    return Tile(SOURCES, words, note, facts, streams=(fresh, replay))


def _buffer(metrics: Metrics) -> list[tuple[str, str]]:
    """Return the facts about groups and stored rows."""
    groups, flat = (sum(value for _, value in finite(metrics, name)) for name in (GROUPS, FLAT_GROUPS))
    facts = [("groups without signal", f"{share(flat / groups, 1)} of {groups:,.0f}")] if groups else []
    if (stored_rows := finite(metrics, "buffer/rows")) and stored_rows[-1][1]:
        drawable = finite(metrics, "buffer/eligible")
        eligible = f", {drawable[-1][1]:,.0f} eligible" if drawable else ""
        facts.append(("in the buffer", f"{stored_rows[-1][1]:,.0f} rows{eligible}"))
    return facts


def setting(config: Config) -> str:
    """Describe in one line the settings that distinguish this run."""
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
    """Metrics that record which names are read. Every metric has one point."""

    def get(self, key: str, default: object = None) -> Series:
        self[key] = ((1, 1.0),)
        return self[key]


@cache
def _find_names_read(made: Callable[[Metrics, Config], Any]) -> tuple[str, ...]:
    """Find the metrics that a function which makes panels or tiles reads."""
    recording = _Recording()
    made(recording, {"run": {}})
    return tuple(sorted(recording))
