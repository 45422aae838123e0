"""The buffer as a list: filtered, sorted, page by page."""

from __future__ import annotations

import shlex
from typing import Any

from replay import stats
from replay.inspector.page import Page, run_of
from replay.inspector.query import Query, address
from replay.inspector.source import Source
from replay.stats import Answer, Sort

_ROWS = 50


def answer(source: Source, query: Query) -> Answer:
    run, sort, conditions = run_of(source, query), query.choice("sort", Sort.iteration), query.texts("where")
    where = " and ".join(f"({condition})" for condition in conditions) or None
    rows = stats.trajectories(
        source.store, run, where=where, sort=sort, limit=query.whole("limit", _ROWS, least=1, most=500)
    )
    return {"run": run, "where": conditions, "sort": sort, "trajectories": rows}


def shows(source: Source, query: Query, found: Answer) -> dict[str, Any]:
    kept = [(name, value) for name, value in query.items() if name in ("run", "sort", "order", "limit")]

    def without(condition: str) -> str:
        return address("buffer", **dict(kept), where=[other for other in found["where"] if other != condition])

    command = ["agentloop", "replay", "ls", *source.run_words, "--sort", found["sort"]]
    if found["where"]:
        command += ["--where", " and ".join(f"({condition})" for condition in found["where"])]
    return {
        "chips": [(condition, without(condition)) for condition in found["where"]],
        "command": shlex.join(command),
        "kept": kept,
    }


PAGE = Page("/buffer", "buffer.html", answer, tab="buffer", shows=shows)
