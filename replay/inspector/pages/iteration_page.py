"""One iteration: what went in, what it taught, what was clipped, and how far the policy had moved from its data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from markupsafe import Markup

from replay import queries
from replay.inspector.drawings.dots import Dot, strip
from replay.inspector.server.page_views import Page
from replay.inspector.server.query_string import QueryString, address
from replay.queries import QueryResult
from replay.queries.open_buffer import OpenBuffer
from replay.records import FRESH, REPLAY

_ROWS = 100
"""Rows of the table at once."""
_MOST_CLIPPED = 8
_MOST_STRIPS = 128


class By(StrEnum):
    """What the table of rows can be sorted by; but for streams and slots the greatest come first."""

    stream = "stream"
    slot = "slot"
    probability = "probability"
    staleness = "staleness"
    reward = "reward"
    stored_advantage = "stored_advantage"
    advantage = "advantage"
    drift_mean = "drift_mean"
    drift_max = "drift_max"
    ess_share = "ess_share"
    approx_kl = "approx_kl"
    clip_fraction = "clip_fraction"


class Stream(StrEnum):
    """Which rows of the update are listed."""

    both = "both"
    replay = REPLAY
    fresh = FRESH


COLUMNS = {
    By.stream: "stream",
    By.slot: "slot",
    By.probability: "probability",
    By.staleness: "stale",
    By.reward: "reward",
    By.stored_advantage: "stored advantage",
    By.advantage: "advantage",
    By.drift_mean: "drift",
    By.drift_max: "largest",
    By.ess_share: "ESS share",
    By.approx_kl: "KL",
    By.clip_fraction: "clipped",
}
"""The table's columns in order; texts stand between them."""


def answer(source: OpenBuffer, query: QueryString) -> QueryResult:
    run = source.store.run(query.path("run"))
    return {"name": run.name, **queries.iteration(source.store, run.id, query.path_whole("number", least=0))}


def shows(source: OpenBuffer, query: QueryString, found: QueryResult) -> dict[str, Any]:
    rows, by, stream = found["trajectories"], query.choice("sort", By.stream), query.choice("stream", Stream.both)
    first = query.whole("from", 0)

    def here(**more: object) -> str:
        kept = {"stream": None if stream is Stream.both else stream, "sort": None if by is By.stream else by}
        return address("runs", found["run"], "iterations", found["iteration"], **{**kept, **more}) + "#rows"

    ordered = [row for row in _ordered(rows, by) if stream in (Stream.both, row["stream"])]
    shown = ordered[first : first + _ROWS]
    said = queries.excerpts(source.store, [row["trajectory"] for row in shown])
    groups, alone = _groups(found)
    clipped = [row for row in _ordered(rows, By.clip_fraction) if row["clip_fraction"]]
    command = ["agentloop", "replay", "lineage", str(found["iteration"]), *source.words_of(found["run"])]
    return {
        "streams": [_stream(found, stream) for stream in (FRESH, REPLAY)],
        "groups_that_teach": groups[:_MOST_STRIPS],
        "groups_left_out": max(0, len(groups) - _MOST_STRIPS),
        "flat": [group for group in found["groups"] if _is_flat(group)],
        "alone": alone,
        "clipped": clipped[:_MOST_CLIPPED],
        "rows": [{**row, **said[row["trajectory"]]} for row in shown],
        "first": first,
        "listed": len(ordered),
        "earlier": here(**{"from": max(0, first - _ROWS)}) if first else None,
        "later": here(**{"from": first + _ROWS}) if first + _ROWS < len(ordered) else None,
        "chosen": stream,
        "choices": [(name, _count(rows, name), here(stream=None if name is Stream.both else name)) for name in Stream],
        "by": by,
        "columns": [(name, title, here(sort=name)) for name, title in COLUMNS.items()],
        "command": shlex.join(command),
    }


def _count(rows: Sequence[QueryResult], stream: Stream) -> int:
    return sum(stream in (Stream.both, row["stream"]) for row in rows)


def _ordered(rows: Sequence[QueryResult], by: By) -> list[QueryResult]:
    if by is By.slot:
        return list(rows)
    if by is By.stream:
        return sorted(rows, key=lambda row: row["stream"] != REPLAY)
    return sorted(rows, key=lambda row: (row[by] is None, -(row[by] or 0.0), row["slot"]))


def _stream(found: QueryResult, stream: str) -> QueryResult:
    """What the update did to all tokens of one stream."""
    metrics = found["metrics"]
    names = {"ess": "ess", "clipped": "pg_clipfrac", "lower": "pg_clipfrac_lower", "kl": "approx_kl", "loss": "pg_loss"}
    known = {key: metrics.get(f"actor/{stream}/{name}") for key, name in names.items()}
    return {"name": stream, "rows": found[stream], "planned": found[f"planned_{stream}"], **known}


def _is_flat(group: QueryResult) -> bool:
    return group["stream"] == FRESH and not group["teaches"]


def _groups(found: QueryResult) -> tuple[list[QueryResult], QueryResult | None]:
    """A strip per group that taught something, and one for drawn rows that came without others of their group."""
    by_slot = {row["slot"]: row for row in found["trajectories"]}
    known = [abs(row["advantage"]) for row in by_slot.values() if row["advantage"] is not None]
    extent = max(known, default=0.0)
    strips, single = [], []
    for group in found["groups"]:
        members = [by_slot[slot] for slot in group["slots"]]
        if group["stream"] == REPLAY and len(members) == 1:
            single += members
        elif not _is_flat(group):
            drawing = _strip(members, extent, f"{len(members)} of group {group['id']}")
            strips.append({"group": group, "drawing": drawing})
    slots = {"slots": [row["slot"] for row in single]}
    alone = {"group": slots, "drawing": _strip(single, extent, "rows drawn alone")}
    return strips, alone if single else None


def _strip(members: Sequence[QueryResult], extent: float, name: str) -> Markup:
    known = [row for row in members if row["advantage"] is not None]
    dots = [
        Dot(
            at=row["advantage"],
            filled=row["success"],
            stream=row["stream"],
            title=f"{row['trajectory'][:10]}: advantage {row['advantage']:.3f}, reward {row['reward']:g}, "
            + ("success" if row["success"] else "no success"),
            href=address("trajectories", row["trajectory"]),
        )
        for row in known
    ]
    summary = f"advantages of {name}: " + ", ".join(f"{row['advantage']:.2f}" for row in known[:16])
    return strip(dots, extent=extent, summary=summary)


PAGE = Page("/runs/{run}/iterations/{number}", "iteration.html", answer, tab="run", shows=shows)
