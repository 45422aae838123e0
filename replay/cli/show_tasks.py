"""`replay tasks | task`: all tasks beside each other, and one of them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from context.visible import visible
from context.wording import excerpt
from replay import queries
from replay.cli.common import AsJson, Run, app, opened, say
from replay.cli.tables import Cell, counted, ended, quoted, row_table, share, yes_or_no
from replay.queries import TaskSort


@app.command(epilog="Example: agentloop replay tasks runs/quickstart-001 --sort replayed")
def tasks(
    run: Run = None,
    sort: Annotated[
        TaskSort, typer.Option(help="What comes first: those that never succeeded, or the greatest of a column.")
    ] = TaskSort.unsolved,
    limit: Annotated[int, typer.Option(min=1, help="Most tasks printed.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List tasks: attempts, successes, when each was tried last, how often its rows were replayed and had drifted."""
    with opened(run) as buffer:
        answer = queries.task_list(buffer.store, buffer.run, sort=sort, limit=limit)
    say(json.dumps(answer, indent=1) if as_json else _list_text(answer))


def _list_text(answer: dict[str, Any]) -> str:
    if not answer["rows"]:
        return "no tasks"
    shown, known = len(answer["rows"]), answer["tasks"]
    lines = [f"{counted(known, 'task')} tried, {answer['never_solved']:,} never solved", ""]
    lines += [row_table(answer["rows"], _LISTED)]
    return "\n".join([*lines, f"{known - shown:,} more: add --limit {known}"] if known > shown else lines)


_LISTED: dict[str, Cell] = {
    "task": lambda row: row["hash"][:12],
    "attempts": "attempts",
    "solved": "successes",
    "success": lambda row: share(row["successes"], row["attempts"]),
    "last": "last_iteration",
    "stored": "eligible",
    "replayed": "replayed",
    "drift": ("drift_mean", 3),
    "most": ("drift_max", 2),
    "prompt": quoted("prompt", 60),
}


@app.command(epilog="Example: agentloop replay task 768d9e runs/quickstart-001")
def task(
    hash: Annotated[str, typer.Argument(metavar="HASH", help="A task's hash, or the beginning of it.")],
    run: Run = None,
    limit: Annotated[int, typer.Option(min=1, help="Most groups and trajectories printed.")] = 20,
    after: Annotated[str | None, typer.Option(help="Trajectories behind the one of this id.")] = None,
    as_json: AsJson = False,
) -> None:
    """One task: its payload, its attempts over time, success by policy version, what is stored of it."""
    with opened(run) as buffer:
        answer = queries.task(buffer.store, hash, buffer.run, after=after, limit=limit)
    say(json.dumps(answer, indent=1) if as_json else _task_text(answer, limit))


def _task_text(answer: dict[str, Any], limit: int) -> str:
    lines = [visible(f"task {answer['hash']}, environment {answer['environment']}")]
    lines += [f"{visible(message['role']):<9} {in_quotes(message['content'])}" for message in answer["prompt"] or ()]
    undone = f", and {answer['orphaned']:,} that a resume undid" if answer["orphaned"] else ""
    lines += [
        f"payload   {visible(payload_text(answer['payload']))}",
        f"attempts  {answer['attempts']:,} in {counted(answer['groups_in_all'], 'group')}, "
        f"{share(answer['successes'], answer['attempts'])} successful{undone}",
        f"stored    {answer['eligible']:,} that can be drawn, replayed {counted(answer['replayed'], 'time')}",
    ]
    tables = ((answer["versions"], _VERSIONS), (answer["groups"][:limit], _GROUPS))
    for rows, cells in (*tables, (answer["trajectories"], _TRAJECTORIES)):
        lines += ["", row_table(rows, cells)] if rows else []
    return "\n".join([*lines, f"further rows: add --after {answer['next']}"] if answer["next"] else lines)


_LONGEST_QUOTE = 400
_LONGEST_PAYLOAD = 2_000
"""Characters shown; --json has all of them."""


def in_quotes(text: str) -> str:
    """In one line: a task may say anything, also to a terminal."""
    return repr(excerpt(text, _LONGEST_QUOTE))


def payload_text(payload: dict[str, Any] | None) -> str:
    """What the environment was given, as JSON; None: it is stored no more."""
    if payload is None:
        return "gone with the last row of the task"
    return excerpt(json.dumps(payload, ensure_ascii=False), _LONGEST_PAYLOAD)


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
