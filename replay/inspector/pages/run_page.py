"""One run: its curves, what went into its batches, its newest iterations; new ones come while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from replay import queries
from replay.inspector.server.page_views import Page
from replay.inspector.server.query_string import QueryString, address
from replay.locate import own_folder
from replay.queries import QueryResult
from replay.queries.open_buffer import OpenBuffer
from replay.queries.runs import ALL
from replay.report.headline import setting
from replay.report.panel_json import plain_panel
from replay.report.panels import panel_groups
from replay.report.series import panel_series, tile_series
from replay.report.tiles import tiles

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
"""The metric behind each column of the table of iterations."""


def answer(source: OpenBuffer, query: QueryString) -> QueryResult:
    """With `after`, only points beyond that iteration; with `mark` too, none at all where nothing new was logged.

    Of a long run every point of a curve is `merged` iterations; from `first` to `last`, where given, they are fewer.
    """
    run = source.store.run(query.path("run"))
    after = query.whole("after", -1, least=-1)
    since = None if query.text("after") is None else after
    progress = queries.progress(source.store, run, own_folder(source.folder, run.id))
    found: QueryResult = {"run": run.id, "name": run.name, "code_version": run.code_version, "progress": progress}
    if since is not None and query.text("mark") == progress["mark"]:
        return {**found, "after": since, "merged": 1, "setting": "", "tiles": [], "groups": [], "iterations": []}
    within = range(query.whole("first", 0), query.whole("last", ALL.stop - 1) + 1)
    merged = queries.merging(source.store, [run.id], within)
    metrics = panel_series(source.store, run.id, merged, within)
    found |= {
        "after": since,
        "merged": merged,
        "setting": setting(run.config),
        "tiles": [asdict(tile) for tile in tiles(tile_series(source.store, run.id), run.config)],
        "groups": [
            {"title": group.title, "panels": [plain_panel(panel, merged=merged, after=since) for panel in group.panels]}
            for group in panel_groups(metrics, run.config)
        ],
        "iterations": _recent(source, run.id, max(after, progress["logged"] - _RECENT - 1)),
    }
    if since is not None:
        return found
    return {**found, "by_workers": queries.is_collected_by_workers(source.store, run), "config": dict(run.config)}


def _recent(source: OpenBuffer, run: str, after: int) -> list[QueryResult]:
    """The newest iterations beyond `after`, newest first."""
    within = range(after + 1, ALL.stop)
    metrics = queries.metric_series(source.store, run, names=tuple(COLUMNS.values()), within=within)
    values = {column: dict(metrics.get(name, ())) for column, name in COLUMNS.items()}
    made = sorted(values["seconds"], reverse=True)
    return [
        {"iteration": iteration, **{column: known.get(iteration) for column, known in values.items()}}
        for iteration in made[:_RECENT]
    ]


def shows(source: OpenBuffer, query: QueryString, found: QueryResult) -> dict[str, Any]:
    run = found["run"]
    others = [(id, name) for id, name in queries.run_names(source.store).items() if id != run]
    text = yaml.safe_dump(found["config"], sort_keys=False, allow_unicode=True) if found.get("config") else ""
    return {
        "charts": {panel["key"]: panel for group in found["groups"] for panel in group["panels"]},
        "iteration_link": address("runs", run, "iterations") + "/{}",
        "config_text": text,
        "others": others[:_RECENT],
        "cluster": address("runs", run, "cluster") if found.get("by_workers") else None,
        "finds": {
            "all trajectories": address("buffer", run=run),
            "failures": address("buffer", run=run, where="not success"),
            "successes replayed at most once": address("buffer", run=run, where=["success", "uses < 2"]),
            "the most replayed": address("buffer", run=run, sort="uses"),
        },
        "held_out": address("runs", run, "held-out"),
    }


PAGE = Page("/runs/{run}", "run.html", answer, tab="run", shows=shows)
