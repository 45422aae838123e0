"""A run that workers collect: who takes part, where every episode is, and who waits for whom; it goes on by itself."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from replay import queries
from replay.inspector.drawings.bars import Bar, Height, Tick, bars
from replay.inspector.server.page_views import Page
from replay.inspector.server.query_string import QueryString, address
from replay.inspector.text.reading import typed
from replay.locate import own_folder
from replay.queries import QueryResult
from replay.queries.collecting.who_waits import advised_command, seconds
from replay.queries.open_buffer import OpenBuffer
from replay.ticket_records import TICKET_STATES

_MOST_PARTICIPANTS = 100
"""Rows of a table; the answer as JSON has all."""
_MOST_BARS = 100
_SIZE = (620, 110)
_PARTS = ("fresh", "late", "unused", "waiting", "open")


def answer(source: OpenBuffer, query: QueryString) -> QueryResult:
    run = source.store.run(query.path("run"))
    return {"name": run.name, **queries.cluster(source.store, run)}


def shows(source: OpenBuffer, query: QueryString, found: QueryResult) -> dict[str, Any]:
    command = ["agentloop", "replay", "cluster", *source.words_of(found["run"])]
    advised = advised_command(found["waits"]["advice"], own_folder(source.folder, found["run"]))
    return {
        "seconds": seconds,
        "by_workers": found["collected_by"] == "workers",
        "advised": typed(advised) if advised else None,
        "parts": [(name, found["counts"][name]) for name in _PARTS],
        "charted": min(_MOST_BARS, len(found["staleness"])),
        "missing": found["counts"]["done"] - found["counts"]["rows"],
        "ticket_states": [(name, found["counts"][name], found["evaluations"][name]) for name in TICKET_STATES],
        "live_workers": sum(not each["gone"] for each in found["workers"]),
        "shown": {role: _quiet_first(found[role]) for role in ("workers", "engines")},
        "charts": [_chart(found, "max", "largest"), _chart(found, "mean", "mean")] if found["staleness"] else [],
        "greatest": max((row["max"] for row in found["staleness"] if row["max"] is not None), default=None),
        "command": typed(command),
    }


def _quiet_first(listed: list[QueryResult]) -> list[QueryResult]:
    """Those that have been silent for longest, for they are what somebody may have to look after."""
    return sorted(listed, key=lambda each: (-each["silent_s"], each["id"]))[:_MOST_PARTICIPANTS]


def _chart(found: QueryResult, name: str, title: str) -> dict[str, Any]:
    """A bar per iteration, which leads to it; a full one is as stale as the configuration allows."""
    rows, bound = found["staleness"][-_MOST_BARS:], found["max_staleness"]
    greatest = max([row["max"] or 0 for row in rows])
    shown = [
        Bar(
            str(row["iteration"]),
            row[name] or 0.0,
            href=address("runs", found["run"], "iterations", row["iteration"]),
            title=f"iteration {row['iteration']}: {title} {_number(row[name])}, {row['rows']:,} fresh rows",
        )
        for row in rows
    ]
    ends = [Tick(0.5, str(rows[0]["iteration"])), Tick(len(rows) - 0.5, str(rows[-1]["iteration"]))]
    drawing: Markup = bars(
        shown,
        summary=f"{title} staleness of the fresh rows of {len(rows)} iterations: a bar leads to its iteration",
        tone="fresh",
        ticks=ends[: len(rows)],
        height=Height(largest=max(1, bound or 0, greatest)),
        size=_SIZE,
    )
    return {"title": title, "drawing": drawing}


def _number(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.3g}"


PAGE = Page("/runs/{run}/cluster", "cluster.html", answer, tab="run", shows=shows)
