"""`report.html`: the run at a glance in one self-contained file, made from the database alone."""

from __future__ import annotations

import os
from pathlib import Path

from replay.report.report_page import ReportData, render_report
from replay.report.series import shown_series
from replay.store import ReplayStore

REPORT_NAME = "report.html"


def write_report(store: ReplayStore, path: Path, *, run: str | None = None, config_text: str) -> Path:
    """Write the report of `run`, or of the only one in `store`, to `path`; an older one is replaced whole.

    `config_text` is the configuration as people read it.
    """
    record = store.run(run)
    data = ReportData(
        name=record.name,
        code_version=record.code_version,
        metrics=shown_series(store, record.id),
        config_text=config_text,
        config=record.config,
    )
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(render_report(data), encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path
