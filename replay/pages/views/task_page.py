"""One task: what it asks, how it was tried over time, how hard it has been, and what is stored of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from starlette.requests import Request

from replay import questions
from replay.pages.addresses import address, in_path, text, whole
from replay.pages.page import Page, run_of
from replay.questions import QueryResult
from replay.questions.open_buffer import OpenBuffer

_ROWS = 50
_GROUPS = 40
"""Attempts over time that are shown."""
_MOST_RUNS = 6
_MOST_BUCKETS = 40


def shows(source: OpenBuffer, request: Request) -> QueryResult:
    run, limit = run_of(source, request), whole(request, "limit", _ROWS, least=1, most=500)
    found = questions.task(source.store, in_path(request, "hash"), run, after=text(request, "after"), limit=limit)
    hash = found["hash"]
    task_is = f"task == {hash!r}"
    given = {name: text(request, name) for name in ("run", "limit")}

    def here(**more: object) -> str:
        return address("tasks", hash, **given, **more) + "#stored"

    by_run = [(name, list(rows)) for name, rows in groupby(found["versions"], key=lambda row: row["run"])]
    return {
        **found,
        "payload_text": found["payload"] and json.dumps(found["payload"], indent=2, ensure_ascii=False),
        "by_version": [{"run": name, **_by_version(rows)} for name, rows in by_run[:_MOST_RUNS]],
        "more_runs": max(0, len(by_run) - _MOST_RUNS),
        "by_difficulty": [_bucket_bar(bucket, run, task_is) for bucket in _filled(found["difficulty"])],
        "newest": next((bucket for bucket in found["difficulty"] if bucket["newest"]), None),
        "tried": found["groups"][:_GROUPS],
        "asked_run": run,
        "in_buffer": address("buffer", run=run or "*", where=[task_is]),
        "further": here(after=found["next"]) if found["next"] else None,
        "newer": here() if text(request, "after") else None,
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


def _filled(buckets: Sequence[QueryResult]) -> list[QueryResult]:
    """With the empty ones between, where groups are small enough to show all."""
    found = {(bucket["size"], bucket["successes"]): bucket for bucket in buckets}
    sizes = sorted({size for size, _ in found})
    if sum(size + 1 for size in sizes) <= _MOST_BUCKETS:
        none = {"groups": 0, "eligible": 0, "replayed": 0, "newest": False}
        for key in [(size, solved) for size in sizes for solved in range(size + 1)]:
            found.setdefault(key, {"size": key[0], "successes": key[1], **none})
    return [found[key] for key in sorted(found)]


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
