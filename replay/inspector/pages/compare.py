"""Two trajectories or two runs side by side, whichever the address names."""

from __future__ import annotations

from typing import Any

from replay.inspector.pages import compare_runs, compare_trajectories
from replay.inspector.server.page import Page
from replay.inspector.server.query_string import QueryString
from replay.queries import QueryResult
from replay.queries.open_buffer import Source


def answer(source: Source, query: QueryString) -> QueryResult:
    runs = compare_runs.asked_runs(source, query)
    return compare_trajectories.answer(source, query) if runs is None else compare_runs.answer(source, runs)


def shows(source: Source, query: QueryString, found: QueryResult) -> dict[str, Any]:
    if found["kind"] == "runs":
        return compare_runs.shows(found)
    return compare_trajectories.shows(source, query, found)


PAGE = Page("/compare", "compare.html", answer, shows=shows)
