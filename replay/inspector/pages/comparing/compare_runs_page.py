"""Two runs of the database side by side: their curves, what differs in their configurations, and their numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from replay import queries
from replay.inspector.server.query_string import BadQuery, QueryString, address
from replay.queries import QueryResult, compare
from replay.queries.open_buffer import OpenBuffer
from replay.report.panel_json import plain_panel
from replay.report.panels import overlaid
from replay.report.series import panel_series


def asked_runs(source: OpenBuffer, query: QueryString) -> tuple[str, str] | None:
    """The ids of both, given as `runs=A,B` or as `a=A&b=B`, by id or name; None where these are not about runs."""
    known = _ids(source)
    names = [name for given in query.texts("runs") for name in given.split(",") if name]
    if not names:
        first, second = (known.get(query.text(name) or "") for name in ("a", "b"))
        return (first, second) if first and second else None
    unknown = [name for name in names if name not in known]
    if len(names) != 2 or unknown:
        got = f"{len(names)}" if len(names) != 2 else f"{unknown[0]!r}"
        raise BadQuery(
            f"runs must name two runs of this database ({', '.join(known)}), got {got}. Runs of other databases: "
            "agentloop replay diff A B"
        )
    return known[names[0]], known[names[1]]


def _ids(source: OpenBuffer) -> Mapping[str, str]:
    """By id, and by name where only one run has it."""
    names = queries.run_names(source.store)
    times = Counter(names.values())
    named = {name: id for id, name in names.items() if times[name] == 1}
    return {**named, **{id: id for id in names}}


def answer(source: OpenBuffer, runs: tuple[str, str]) -> QueryResult:
    store = source.store
    records = [store.run(run) for run in runs]
    merged = queries.merging(store, runs)
    series = [panel_series(store, run, merged) for run in runs]
    groups = [
        {"title": group.title, "panels": [plain_panel(panel, merged=merged) for panel in group.panels]}
        for group in overlaid(series[0], series[1])
    ]
    return {
        "kind": "runs",
        "run": None,
        "runs": [{"run": record.id, "name": record.name, "code_version": record.code_version} for record in records],
        **compare.buffers((store, store), runs),
        "merged": merged,
        "groups": groups,
    }


def shows(found: QueryResult) -> dict[str, Any]:
    numbers = {name: pair for name, pair in found["numbers"].items() if pair[0] != pair[1]}
    return {
        "charts": {panel["key"]: panel for group in found["groups"] for panel in group["panels"]},
        "sides": [
            {"letter": letter, "name": row["name"], "id": row["run"], "href": address("runs", row["run"])}
            for letter, row in zip("AB", found["runs"], strict=True)
        ],
        "different_numbers": {name: [_counted(value) for value in pair] for name, pair in numbers.items()},
        "same_numbers": len(found["numbers"]) - len(numbers),
        "different_keys": {name: [_shown(value) for value in pair] for name, pair in found["config"].items()},
    }


def _counted(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else _shown(value)


def _shown(value: object) -> str:
    """To the last digit of whole numbers and six of others, so that what differs does not look alike."""
    if value is None:
        return "\u2013"
    if isinstance(value, str):
        return value
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
