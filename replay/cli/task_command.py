"""`replay task`: how one task was tried over time."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from context.visible import visible
from context.wording import excerpt
from replay import queries
from replay.cli.common import AsJson, Run, app, opened, say
from replay.cli.tables import Cell, ended, row_table, share, yes_or_no

_LONGEST = 400
"""Characters of a message shown."""


@app.command(epilog="Example: agentloop replay task 768d9e runs/quickstart-001")
def task(
    hash: Annotated[str, typer.Argument(metavar="HASH", help="A task's hash, or the beginning of it.")],
    run: Run = None,
    limit: Annotated[int, typer.Option(min=1, help="Most groups and trajectories printed.")] = 20,
    after: Annotated[str | None, typer.Option(help="Trajectories behind the one of this id.")] = None,
    as_json: AsJson = False,
) -> None:
    """One task: its attempts over time, success by policy version, how hard it has been, what is stored of it."""
    with opened(run) as buffer:
        answer = queries.task(buffer.store, hash, buffer.run, after=after, limit=limit)
    say(json.dumps(answer, indent=1) if as_json else _text(answer, limit))


def _text(answer: dict[str, Any], limit: int) -> str:
    lines = [visible(f"task {answer['hash']}, environment {answer['environment']}")]
    lines += [f"{visible(message['role']):<9} {_quoted(message['content'])}" for message in answer["prompt"] or ()]
    lines += [] if answer["prompt"] else [f"payload   {_quoted(json.dumps(answer['payload']))}"]
    undone = f", and {answer['orphaned']:,} that a resume undid" if answer["orphaned"] else ""
    lines += [
        f"attempts  {answer['attempts']:,} in {answer['groups_in_all']:,} groups, "
        f"{share(answer['successes'], answer['attempts'])} successful{undone}",
        f"stored    {answer['eligible']:,} that can be drawn, replayed {answer['replayed']:,} times",
    ]
    tables = ((answer["versions"], _VERSIONS), (answer["groups"][:limit], _GROUPS))
    for rows, cells in (*tables, (answer["trajectories"], _TRAJECTORIES)):
        lines += ["", row_table(rows, cells)] if rows else []
    return "\n".join([*lines, f"more: --after {answer['next']}"] if answer["next"] else lines)


def _quoted(text: str) -> str:
    """In one line: a task may say anything, also to a terminal."""
    return repr(excerpt(text, _LONGEST))


_VERSIONS: dict[str, Cell] = {
    "policy": lambda row: str(row["first"]) if row["first"] == row["last"] else f"{row['first']} to {row['last']}",
    "attempts": "attempts",
    "success": lambda row: share(row["successes"], row["attempts"]),
    "reward": ("reward_mean", 3),
}
_GROUPS: dict[str, Cell] = {
    "iter": "iteration",
    "successes": lambda row: f"{row['successes']} of {row['size']}",
    "reward": ("reward_mean", 3),
    "stored": "eligible",
    "replayed": "replayed",
}
_TRAJECTORIES: dict[str, Cell] = {
    "id": lambda row: row["id"][:12],
    "iter": "iteration",
    "reward": lambda row: f"{row['reward']:g}",
    "success": yes_or_no("success"),
    "stop": ended,
    "uses": "uses",
    "state": "state",
}
