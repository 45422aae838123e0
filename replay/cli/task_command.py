"""`replay task`: how one task was tried over time."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from context.visible import visible
from replay import queries
from replay.cli.common import AsJson, Run, app, opened, say
from replay.cli.tables import number, share, table

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
    if answer["versions"]:
        lines += ["", _versions_text(answer)]
    if answer["groups"]:
        lines += ["", _groups_text(answer["groups"][:limit])]
    if answer["trajectories"]:
        lines += ["", _trajectories_text(answer)]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """In one line: a task may say anything, also to a terminal."""
    return repr(text if len(text) <= _LONGEST else text[:_LONGEST] + "...")


def _versions_text(answer: dict[str, Any]) -> str:
    rows = [
        [
            str(row["first"]) if row["first"] == row["last"] else f"{row['first']} to {row['last']}",
            str(row["attempts"]),
            share(row["successes"], row["attempts"]),
            number(row["reward_mean"], 3),
        ]
        for row in answer["versions"]
    ]
    return table(["policy", "attempts", "success", "reward"], rows)


def _groups_text(groups: list[dict[str, Any]]) -> str:
    rows = [
        [
            str(row["iteration"]),
            f"{row['successes']} of {row['size']}",
            number(row["reward_mean"], 3),
            str(row["eligible"]),
            str(row["replayed"]),
        ]
        for row in groups
    ]
    return table(["iter", "successes", "reward", "stored", "replayed"], rows)


def _trajectories_text(answer: dict[str, Any]) -> str:
    rows = [
        [
            row["id"][:12],
            str(row["iteration"]),
            f"{row['reward']:g}",
            "yes" if row["success"] else "no",
            row["stop_reason"] + (f"/{row['error_kind']}" if row["error_kind"] else ""),
            str(row["uses"]),
            row["state"],
        ]
        for row in answer["trajectories"]
    ]
    more = f"\nmore: --after {answer['next']}" if answer["next"] else ""
    return table(["id", "iter", "reward", "success", "stop", "uses", "state"], rows) + more
