"""The runs of the database."""

from __future__ import annotations

from replay import queries
from replay.inspector.server.page_views import Page, Redirect
from replay.inspector.server.query_string import QueryString, address
from replay.queries import QueryResult
from replay.queries.open_buffer import OpenBuffer


def answer(source: OpenBuffer, query: QueryString) -> QueryResult:
    """All of them; where there is only one, it is shown instead."""
    found = queries.runs(source.store)
    if len(found) == 1 and query.text("all") is None:
        raise Redirect(address("runs", found[0]["id"]))
    return {"run": None, "runs": found}


PAGE = Page("/", "runs.html", answer, tab="runs")
