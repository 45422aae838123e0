"""`report.html` in the run folder: the run at a glance, made from the database alone."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from agentloop.config import RunConfig
from agentloop.config.file import describe_config, load_plain
from agentloop.errors import UserError
from agentloop.report.page import ReportData, render_report
from replay.records import RunRecord
from replay.stats import metric_series
from replay.store import ReplayStore

REPORT_NAME = "report.html"


def write_report(
    store: ReplayStore, run_folder: Path, *, run: str | None = None, further: tuple[str, ...] = ()
) -> Path:
    """Write the report of `run`, or of the only one in `store`, and return its path; an older one is replaced whole.

    `further` is markup of sections below the panels.
    """
    path = run_folder / REPORT_NAME
    beside = path.with_name(f"{REPORT_NAME}.tmp")
    beside.write_text(render_report(replace(report_data(store, run), further=further)), encoding="utf-8")
    os.replace(beside, path)
    return path


def report_data(store: ReplayStore, id: str | None = None) -> ReportData:
    """What the page needs, read from the database."""
    run = store.run(id)
    text, config = _config_of(run)
    return ReportData(
        name=run.name,
        code_version=run.code_version,
        metrics=metric_series(store, run.id),
        config_text=text,
        config=config,
    )


def _config_of(run: RunRecord) -> tuple[str, RunConfig | None]:
    """The configuration as people read it; as stored when this version no longer knows its keys."""
    try:
        config = load_plain(run.config)
    except UserError:
        return json.dumps(dict(run.config), indent=2), None
    return describe_config(config), config
