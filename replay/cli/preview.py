"""`replay preview`: the next batch of a run under other settings."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from replay import queries as questions
from replay.cli.common import AsJson, Run, RunId, app, fail, opened, say
from replay.cli.tables import number, share, table
from replay.locate import own_folder
from replay.queries.open_buffer import asked_run
from replay.queries.preview.settings import MODES, UNITS

_COLUMNS = ("id", "stale", "reward", "success", "share", "replayed", "task")
_OWN = "; as the run when left out"


@app.command(epilog="Example: agentloop replay preview --fraction 0.5 --sampler recency --option half_life=4")
def preview(
    run: Run = None,
    fraction: Annotated[str | None, typer.Option(help=f"Share of the batch that is replayed{_OWN}.")] = None,
    unit: Annotated[str | None, typer.Option(help=f"One of {', '.join(UNITS)}{_OWN}.")] = None,
    task_members: Annotated[str | None, typer.Option(help="Replayed members of a mixed group (unit task).")] = None,
    sampler: Annotated[str | None, typer.Option(help=f"A built-in one{_OWN}.")] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the sampler.")] = None,
    successful_only: Annotated[bool | None, typer.Option("--successful-only/--failed-too", help="Which rows.")] = None,
    max_staleness: Annotated[str | None, typer.Option(help=f"In policy versions; null: however old{_OWN}.")] = None,
    max_uses: Annotated[str | None, typer.Option(help=f"Draws of one row; null: any number{_OWN}.")] = None,
    mode: Annotated[str | None, typer.Option(help=f"One of {', '.join(MODES)}{_OWN}.")] = None,
    run_id: RunId = None,
    as_json: AsJson = False,
) -> None:
    """What the next batch of a run would be. Nothing is drawn or changed.

    Exit code 1 where the settings can't be used.
    """
    asked: dict[str, str | None] = {
        "fraction": fraction,
        "unit": unit,
        "task_members": task_members,
        "sampler": sampler,
        "successful_only": None if successful_only is None else str(successful_only).lower(),
        "max_staleness": max_staleness,
        "max_uses": max_uses,
        "mode": mode,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    with opened(run) as buffer:
        mine = asked_run(buffer, run_id)
        if option:
            kind = sampler or questions.preview(buffer.store, mine)["own"]["sampler"]
            given |= {f"{kind}.{name}": value for name, value in map(_pair, option)}
        answer = questions.preview(buffer.store, mine, given, folder=own_folder(buffer.folder, mine))
    if as_json:
        say(json.dumps(answer, indent=1))
    else:
        say("\n".join(answer["errors"].values()) if answer["errors"] else _text(answer))
    raise typer.Exit(1 if answer["errors"] else 0)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        fail(f"--option must be NAME=VALUE, got {text!r}.")
    return name, value


def _text(answer: dict[str, Any]) -> str:
    plan, batch = answer["plan"], answer["batch"]
    sizes = " ".join(f"{count}x{size}" for size, count in plan["groups"]) or "-"
    lines = [
        f"iteration     {answer['iteration']}, policy {answer['policy_version']}",
        f"fresh         {plan['fresh']} in groups {sizes}",
        f"replayed      {plan['replay']} of {plan['planned_replay']} planned ({share(plan['fraction'], 1)} configured)",
        "",
        table(["rule", "left", "left out"], [[s["rule"], f"{s['left']}", f"{s['out']}"] for s in answer["funnel"]]),
    ]
    if batch["rows"]:
        rows = [
            [
                row["id"][:12],
                number(row["staleness"], 0),
                number(row["reward"], 3),
                "yes" if row["success"] else "no",
                number(row["probability"], 4),
                str(row["replayed"]),
                row["task"][:8],
            ]
            for row in batch["rows"]
        ]
        whose = "what the run would draw" if batch["exact"] else "an example"
        lines += ["", f"{whose}:", table(_COLUMNS, rows)]
    return "\n".join([*lines, "", answer["yaml"].rstrip()])
