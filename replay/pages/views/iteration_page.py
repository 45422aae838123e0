"""The page of one iteration: its rows and groups, and how far the policy had moved from its data."""

import shlex
from collections.abc import Sequence

from starlette.requests import Request

from replay import questions
from replay.open_buffer import OpenBuffer
from replay.pages.addresses import address, parse_number, read_choice, read_number, read_path_part
from replay.pages.page import Page
from replay.questions import QueryResult
from replay.questions.table_series import TABLE_SERIES, table_series
from replay.records import FRESH, REPLAY

_ROWS = 100
"""Rows of the table on one page."""
_MOST_GROUPS = 128
COLUMNS = {
    "stream": "stream",
    "slot": "slot",
    "probability": "probability",
    "staleness": "stale",
    "reward": "reward",
    "stored_advantage": "stored advantage",
    "advantage": "advantage",
    "drift_mean": "drift",
    "token_gap_max": "largest gap",
    "ess_share": "weight share",
    "approx_kl": "KL",
    "clip_fraction": "clipped",
}
"""The columns that the table of rows can be sorted by, with their titles. The greatest values come first, except for
streams and slots."""


def shows(source: OpenBuffer, request: Request) -> QueryResult:
    run = source.store.run(read_path_part(request, "run"))
    found = questions.iteration(source.store, run.id, parse_number("number", read_path_part(request, "number")))
    within = range(found["iteration"], found["iteration"] + 1)
    known = table_series(source.store, run.id, TABLE_SERIES - found["metrics"].keys(), within=within)
    found["metrics"] |= {name: points[0][1] for name, points in known.items()}
    by, first = read_choice(request, "sort", COLUMNS), read_number(request, "from", 0)
    rows = found["trajectories"]

    def here(**more: object) -> str:
        return address("runs", found["run"], "iterations", found["iteration"], **{"sort": by, **more}) + "#rows"

    ordered = _ordered(rows, by)
    shown = ordered[first : first + _ROWS]
    said = questions.excerpts(source.store, [row["trajectory"] for row in shown])
    by_slot = {row["slot"]: row for row in rows}
    groups = [{**group, "members": [by_slot[slot] for slot in group["slots"]]} for group in found["groups"]]
    command = ["agentloop", "replay", "lineage", str(found["iteration"]), *source.words_of(found["run"])]
    return {
        **found,
        "name": run.name,
        "streams": [(stream, found[stream]) for stream in (FRESH, REPLAY)],
        "of": lambda stream, name: found["metrics"].get(f"actor/{stream}/{name}"),
        "groups": groups,
        "most_groups": _MOST_GROUPS,
        "rows": [{**row, **said[row["trajectory"]]} for row in shown],
        "first": first,
        "listed": len(ordered),
        "at_once": _ROWS,
        "here": here,
        "by": by,
        "columns": COLUMNS,
        "command": shlex.join(command),
    }


def _ordered(rows: Sequence[QueryResult], by: str) -> list[QueryResult]:
    if by == "slot":
        return list(rows)
    if by == "stream":
        return sorted(rows, key=lambda row: row["stream"] != REPLAY)
    return sorted(rows, key=lambda row: (row[by] is None, -(row[by] or 0.0), row["slot"]))


PAGE = Page("/runs/{run}/iterations/{number}", "iteration.html", shows, tab="run")
