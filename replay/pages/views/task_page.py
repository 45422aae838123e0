"""One task: what it asks, how it was tried over time, how hard it has been, and what is stored of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from starlette.requests import Request

from replay import questions
from replay.pages.addresses import address, in_path
from replay.pages.page import Page, run_of
from replay.questions import QueryResult
from replay.questions.open_buffer import OpenBuffer

_GROUPS = 40
"""Attempts over time that are shown."""
_MOST_RUNS = 6


def shows(source: OpenBuffer, request: Request) -> QueryResult:
    run = run_of(source, request)
    found = questions.task(source.store, in_path(request, "hash"), run)
    task_is = f"task == {found['hash']!r}"
    by_run = [(name, list(rows)) for name, rows in groupby(found["versions"], key=lambda row: row["run"])]
    return {
        **found,
        "payload_text": found["payload"] and json.dumps(found["payload"], indent=2, ensure_ascii=False),
        "by_version": [{"run": name, **_by_version(rows)} for name, rows in by_run[:_MOST_RUNS]],
        "more_runs": max(0, len(by_run) - _MOST_RUNS),
        "by_difficulty": [_bucket_bar(bucket, run, task_is) for bucket in found["difficulty"]],
        "newest": next((bucket for bucket in found["difficulty"] if bucket["newest"]), None),
        "tried": found["groups"][:_GROUPS],
        "asked_run": run,
        "in_buffer": address("buffer", run=run or "*", where=[task_is]),
        "several": run is None and found["runs"] > 1,
    }


def _by_version(rows: Sequence[QueryResult]) -> QueryResult:
    """Percent of successes by policy version, as bars, and what they show in words."""
    bars = []
    for row in rows:
        name = str(row["version"])
        title = f"policy {name}: {row['successes']:,} of {row['attempts']:,} attempts successful"
        bars.append({"label": name, "count": 100 * row["successes"] / row["attempts"], "title": title})
    at = [f"{bar['count']:.0f} % at {bar['label']}" for bar in (bars[0], bars[-1])]
    return {"bars": bars, "summary": f"success by policy version, from {at[0]} to {at[1]}"}


def _bucket_bar(bucket: QueryResult, run: str | None, task_is: str) -> QueryResult:
    """The groups with so many successes, as a bar that leads to their rows."""
    solved, size = bucket["successes"], bucket["size"]
    around = f"{(solved - 0.5) / size:.6g} <= group_success < {(solved + 0.5) / size:.6g}"
    rows = address("buffer", run=run or "*", where=[task_is, f"group_size == {size} and {around}"])
    title = f"{solved} of {size}: {bucket['groups']:,} groups, {bucket['eligible']:,} rows that can be drawn, "
    return {
        "label": f"{solved}/{size}",
        "count": bucket["groups"],
        "href": rows if bucket["groups"] else None,
        "title": f"{title}drawn {bucket['replayed']:,} times" + ("; the newest group" * bucket["newest"]),
        "selected": bucket["newest"],
    }


PAGE = Page("/tasks/{hash}", "task.html", shows, tab="buffer")
