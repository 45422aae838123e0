"""`replay cluster`: who collects a run, and who waits for whom, for people who reach it by ssh alone."""

from __future__ import annotations

import json
import shlex
from typing import Any

from context.visible import visible
from replay import queries
from replay.cli.common import AsJson, Run, RunId, app, opened, say
from replay.cli.tables import Cell, number, row_table, share
from replay.locate import own_folder
from replay.queries.collecting.who_waits import advised_command, seconds
from replay.queries.open_buffer import asked_run

Answer = dict[str, Any]
_MOST = 50
"""Workers or engines printed; --json prints all."""


@app.command(epilog="Example: agentloop replay cluster runs/quickstart-001")
def cluster(run: Run = None, run_id: RunId = None, as_json: AsJson = False) -> None:
    """Who collects a run: workers, engines, tickets, and who waits for whom."""
    with opened(run) as buffer:
        record = buffer.store.run(asked_run(buffer, run_id))
        answer = {"name": record.name, **queries.cluster(buffer.store, record)}
        advised = advised_command(answer["waits"]["advice"], own_folder(buffer.folder, record.id))
    say(json.dumps(answer, indent=1) if as_json else _cluster_text(answer, advised))


def _cluster_text(answer: Answer, advised: list[str]) -> str:
    lines = [visible(answer["waits"]["text"]), *([f"  {visible(shlex.join(advised))}"] if advised else [])]
    if answer["collected_by"] == "workers":
        lines += ["", *_facts(answer)]
        for name, cells in (("reasons", _REASONS), ("workers", _WORKERS), ("engines", _ENGINES)):
            listed = sorted(answer[name], key=lambda each: -each.get("silent_s", 0.0))
            lines += ["", row_table(listed[:_MOST], cells)] if listed else []
            lines += [f"and {len(listed) - _MOST:,} more {name}: see --json"] if len(listed) > _MOST else []
    return "\n".join(lines)


def _facts(answer: Answer) -> list[str]:
    counts, evaluations, oldest = answer["counts"], answer["evaluations"], answer["oldest"]
    check = "adds up" if counts["adds_up"] else f"DOES NOT ADD UP: the sum is {counts['rows']:,}"
    parts = " + ".join(f"{counts[part]:,} {part}" for part in ("fresh", "late", "unused", "waiting", "open"))
    train, evaluation = (
        ", ".join(f"{of[state]:,} {state}" for state in ("queued", "leased", "done", "failed", "revoked"))
        for of in (counts, evaluations)
    )
    return [
        f"iteration   {answer['iteration']:,} is the newest",
        f"learner     {_leader(answer['leader'])}",
        f"done        {counts['done']:,} = {parts}: {check}",
        f"tickets     {train}; {answer['tried_again']:,} claimed more than once",
        *([f"evaluation  {evaluation}"] if any(evaluations.values()) else []),
        f"oldest      queued {_episode(oldest['queued'])}; with a worker {_episode(oldest['leased'])}",
        f"late        {share(counts['late'], counts['fresh'] + counts['late'])} of the rows that were to be fresh",
        f"staleness   {_staleness(answer)}",
    ]


def _leader(leader: Answer | None) -> str:
    if leader is None:
        return "none"
    left = leader["lease_s"]
    lease = f"its lease holds for {seconds(left)}" if leader["holds"] else f"its lease is over since {seconds(-left)}"
    return visible(f"{leader['id']}, {lease}")


def _episode(found: Answer | None) -> str:
    if found is None:
        return "none"
    holder = f" ({found['holder']})" if found["holder"] is not None else ""
    return visible(f"for {seconds(found['age_s'])}{holder}")


def _staleness(answer: Answer) -> str:
    rows = [row for row in answer["staleness"] if row["max"] is not None]
    if not rows:
        return "no batch yet"
    bound = "-" if answer["max_staleness"] is None else f"{answer['max_staleness']}"
    last = f"{number(rows[-1]['mean'], 2)} on average in iteration {rows[-1]['iteration']}"
    return f"{max(row['max'] for row in rows)} at most in {len(rows)} iterations, of {bound} allowed; {last}"


def _known(name: str) -> Cell:
    return lambda row: "-" if row[name] is None else str(row[name])


def _time(name: str) -> Cell:
    return lambda row: seconds(row[name])


_REASONS: dict[str, Cell] = {"episodes": "count", "state": "state", "ended without a row because": _known("reason")}
_WORKERS: dict[str, Cell] = {
    "worker": "id",
    **{name: _known(name) for name in ("host", "pid", "state")},
    "leases": "leased",
    "in flight": _known("in_flight"),
    **{name: _known(name) for name in ("done", "failed")},
    "tool errors": _known("tool_errors"),
    "silent": _time("silent_s"),
    "age": _time("age_s"),
}
_ENGINES: dict[str, Cell] = {
    "engine": "id",
    **{name: _known(name) for name in ("state", "version", "label", "adapter")},
    "probe difference": lambda row: "-" if row["difference"] is None else f"{row['difference']:.2g}",
    "silent": _time("silent_s"),
    "age": _time("age_s"),
}
