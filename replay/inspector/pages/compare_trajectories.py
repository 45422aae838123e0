"""Two trajectories side by side: where their tokens part, and their records."""

from __future__ import annotations

from typing import Any

from replay import compare
from replay.inspector.query import BadQuery, Query, address
from replay.inspector.source import Source
from replay.stats import Answer


def answer(source: Source, query: Query) -> Answer:
    pair = query.text("a"), query.text("b")
    if pair[0] is None or pair[1] is None:
        raise BadQuery("a and b must name two trajectories, or two runs, got none. Write /compare?a=ID&b=ID")
    return {"kind": "trajectories", "run": None, **compare.trajectories(source.store, pair[0], pair[1])}


def shows(source: Source, query: Query, found: Answer) -> dict[str, Any]:
    return {"sides": [(id, address("trajectories", id)) for id in found["ids"]]}
