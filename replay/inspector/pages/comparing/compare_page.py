"""Two trajectories or two runs side by side, whichever the address names."""

from __future__ import annotations

from typing import Any

from replay.inspector.pages.comparing import compare_runs_page, compare_trajectories_page
from replay.inspector.server.page_views import Page
from replay.inspector.server.query_string import QueryString
from replay.queries import QueryResult
from replay.queries.open_buffer import OpenBuffer


def answer(source: OpenBuffer, query: QueryString) -> QueryResult:
    runs = compare_runs_page.asked_runs(source, query)
    return compare_trajectories_page.answer(source, query) if runs is None else compare_runs_page.answer(source, runs)


def shows(source: OpenBuffer, query: QueryString, found: QueryResult) -> dict[str, Any]:
    if found["kind"] == "runs":
        return compare_runs_page.shows(found)
    return compare_trajectories_page.shows(source, query, found)


PAGE = Page("/compare", "compare.html", answer, shows=shows)
