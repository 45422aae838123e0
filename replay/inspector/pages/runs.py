"""The runs of the database."""

from __future__ import annotations

from replay import stats
from replay.inspector.page import Elsewhere, Page
from replay.inspector.query import Query, address
from replay.inspector.source import Source
from replay.stats import Answer


def answer(source: Source, query: Query) -> Answer:
    """All of them; where there is only one, it is shown instead."""
    found = stats.runs(source.store)
    if len(found) == 1 and query.text("all") is None:
        raise Elsewhere(address("runs", found[0]["id"]))
    return {"run": None, "runs": found}


PAGE = Page("/", "runs.html", answer, tab="runs")
