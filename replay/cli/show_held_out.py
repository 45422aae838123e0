"""`replay held-out`: what evaluations were asked and answered."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from context.conversation_text import conversation_text
from context.visible import visible
from replay import queries
from replay.cli.common import AsJson, Run, RunId, app, opened, say
from replay.cli.tables import Cell, counted, ended, quoted, row_table, share, yes_or_no
from replay.queries.open_buffer import asked_run


@app.command(
    "held-out", epilog="Example: agentloop replay held-out --failed, then: agentloop replay held-out --task 3f9a21"
)
def held_out(
    run: Run = None,
    run_id: RunId = None,
    iteration: Annotated[
        int | None, typer.Option(min=0, help="Of the evaluation after this one; the newest when left out.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="HASH", help="Print all that was said on this task, in every evaluation.")
    ] = None,
    success: Annotated[bool | None, typer.Option("--success/--failed", help="Only these; both when left out.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most episodes printed.")] = 20,
    after: Annotated[int | None, typer.Option(min=0, metavar="NUMBER", help="Go on behind this episode.")] = None,
    as_json: AsJson = False,
) -> None:
    """Episodes of an evaluation, one line each. They are kept apart from the buffer: none is ever drawn."""
    with opened(run) as buffer:
        asked = asked_run(buffer, run_id)
        if task is not None:
            on_task = queries.held_out_task(buffer.store, asked, task, limit=limit)
            say(json.dumps(on_task, indent=1) if as_json else _task_text(on_task))
            return
        answer = queries.held_out(buffer.store, asked, iteration, success=success, after=after, limit=limit)
    say(json.dumps(answer, indent=1) if as_json else _list_text(answer))
    if answer["next"] is not None:
        say(f"further episodes: add --after {answer['next']}", error=True)


_LISTED: dict[str, Cell] = {
    "number": "number",
    "task": lambda row: row["task"][:8],
    "reward": lambda row: f"{row['reward']:g}",
    "success": yes_or_no("success"),
    "turns": "num_turns",
    "tools": "num_tool_calls",
    "stop": ended,
    "prompt": quoted("prompt", 48),
    "last answer": quoted("answer", 32),
}


def _list_text(answer: dict[str, Any]) -> str:
    if answer["iteration"] is None:
        return "no episodes of evaluations are kept: see evaluation.keep_episodes"
    made = {each["iteration"]: each for each in answer["evaluations"]}
    mine = made.pop(answer["iteration"])
    lines = [
        f"evaluation after iteration {answer['iteration']:,}: {counted(mine['episodes'], 'episode')}, "
        f"{share(mine['successes'], mine['episodes'])} successful"
    ]
    if made:
        others = ", ".join(f"{i} ({share(each['successes'], each['episodes'])})" for i, each in made.items())
        lines.append(f"others: --iteration {others}")
    return "\n".join([*lines, row_table(answer["rows"], _LISTED) if answer["rows"] else "no such episode"])


def _task_text(answer: dict[str, Any]) -> str:
    lines = [f"held-out task {answer['task']}"]
    for episode in answer["episodes"]:
        outcome = f"reward {episode['reward']:g}, {'success' if episode['success'] else 'no success'}"
        lines += ["", f"after iteration {episode['iteration']}: {outcome}, {visible(episode['stop_reason'])}"]
        said = episode["messages"]
        lines.append("what was said can't be read" if said is None else conversation_text(said))
    return "\n".join(lines)
