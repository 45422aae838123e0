"""`replay lineage`: which experience fed which update."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from agentloop.cli.options import AsJson
from agentloop.cli.replay.common import Run, RunId, app, fail, opened, say, say_json
from agentloop.cli.replay.look import uses_text
from context.wording import visible
from replay import questions
from replay.questions.iteration import lineage_up_to
from replay.questions.open_buffer import asked_run
from replay.questions.trajectory import lineage_of
from replay.text_tables import Cell, number, row_table, share, state_text, table

_COMPLETE = "COMPLETE"
"""Marks whole checkpoints; see agentloop.runs.checkpoint."""


@app.command(epilog="Example: agentloop replay lineage 12, or: agentloop replay lineage 3f9a21")
def lineage(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A number: what that iteration learned from. A checkpoint's or policy's folder: what its weights "
            "learned from. A trajectory's id: what it came from and what learned from it.",
        ),
    ],
    run: Run = None,
    run_id: RunId = None,
    as_json: AsJson = False,
) -> None:
    """Which experience fed which update, and how far it had drifted when it did."""
    folder = _checkpoint_folder(what)
    if folder is not None:
        iteration, run = folder[0], run or str(folder[1])
    with opened(run) as buffer:
        if folder is not None:
            answer = lineage_up_to(buffer.store, asked_run(buffer, run_id), iteration)
            text = _checkpoint_text(answer)
        elif re.fullmatch(r"[0-9]{1,7}", what):
            answer = questions.iteration(buffer.store, asked_run(buffer, run_id), int(what))
            answer["checkpoint"] = _first_holding(buffer.folder, answer["iteration"])
            text = _iteration_text(answer)
        elif run_id is not None:
            fail(f"--run must be left out for a trajectory, whose id is of one run, got {run_id}. WHAT was {what}.")
        else:
            answer = lineage_of(buffer.store, what)
            for use in answer["uses"]:
                use["held_by"] = _first_holding(buffer.folder, use["iteration"])
            text = _trajectory_text(answer)
    say_json(answer) if as_json else say(text)


def _checkpoint_folder(what: str) -> tuple[int, Path] | None:
    """(iteration, run folder) of RUN/checkpoints/000010, RUN/policies/000010, or the model folder in one of these."""
    path = Path(what)
    if not os.path.isdir(path):
        return None
    path = path.absolute()
    path = path.parent if path.name == "model" else path
    if path.parent.name not in ("checkpoints", "policies") or not path.name.isdecimal():
        fail(f"WHAT must be a checkpoint's folder, such as RUN/checkpoints/000010, got {what}.")
    return int(path.name), path.parent.parent


def _first_holding(folder: Path | None, iteration: int) -> str | None:
    """The oldest checkpoint still there whose weights have learned from that iteration."""
    found = folder / "checkpoints" if folder else None
    if found is None or not found.is_dir():
        return None
    whole = sorted(int(p.name) for p in found.iterdir() if p.name.isdecimal() and (p / _COMPLETE).exists())
    later = [number for number in whole if number >= iteration]
    return str(found / f"{later[0]:06d}") if later else None


_FED: dict[str, Cell] = {
    "slot": "slot",
    "stream": "stream",
    "id": lambda row: row["trajectory"][:12],
    "from": lambda row: str(row["collected_iteration"]) if row["collected_run"] == row["run"] else row["source"],
    "share": ("probability", 4),
    "stale": ("staleness", 0),
    "reward": lambda row: f"{row['reward']:g}",
    "advantage": ("advantage", 3),
    "drift": ("drift_mean", 4),
    "ess": ("ess_share", 4),
    "clipped": ("clip_fraction", 3),
    "state": state_text,
}
_PARTS = ("p01", "p50", "p99")
_ITERATIONS: dict[str, Cell] = {
    "iter": "iteration",
    "policy": "policy_version",
    "fresh": "fresh",
    "drawn": "replay",
    "steps": "optimizer_steps",
}


def _iteration_text(answer: dict[str, Any]) -> str:
    lines = [
        f"iteration {answer['iteration']} of run {answer['run']}: {answer['fresh']:,} fresh, "
        f"{answer['replay']:,} drawn, {answer['optimizer_steps']:,} optimizer steps",
        f"collected by policy {answer['policy_version']}, made policy {answer['makes_policy_version']}",
        f"in checkpoint {answer['checkpoint'] or '- (none kept)'}",
        "",
        row_table(answer["trajectories"], _FED) if answer["trajectories"] else "no trajectories",
    ]
    measured = [
        [of, stream, *(number(answer["metrics"].get(f"actor/{stream}/{of}_{part}"), 3) for part in _PARTS)]
        for of in ("ratio", "drift")
        for stream in ("fresh", "replay")
        if answer["metrics"].get(f"actor/{stream}/{of}_p50") is not None
    ]
    return "\n".join([*lines, "", table(["quantity", "stream", *_PARTS], measured)] if measured else lines)


def _checkpoint_text(answer: dict[str, Any]) -> str:
    lines = [
        f"after iteration {answer['iteration']} of run {answer['run']} (policy {answer['policy_version']}): "
        f"{answer['different']:,} different trajectories, used {answer['fresh']:,} times fresh "
        f"and {answer['replay']:,} times drawn"
    ]
    if answer["iterations"]:
        lines += ["", row_table(answer["iterations"], _ITERATIONS)]
        lines += ["", "the trajectories of one: agentloop replay lineage ITER; all of them: --json"]
    return "\n".join(lines)


def _trajectory_text(answer: dict[str, Any]) -> str:
    facts = [
        f"trajectory {answer['id']}, {state_text(answer)}",
        f"collected in iteration {answer['collected_iteration']} of run {answer['collected_run']}, by policy "
        f"{answer['policy_version_min']}, source {answer['source']}"
        + (f", from {answer['parent']}" if answer["parent"] else ""),
        f"group {answer['group']}, {share(answer['success_rate'], 1)} successful; reward {answer['reward']:g}, "
        f"advantage {answer['stored_advantage']:+.3f}",
    ]
    if answer["children"]:
        facts.append(f"stored again as what it solved: {', '.join(answer['children'])}")
    lines = [*map(visible, facts), "", "every update that used it:", uses_text(answer["uses"])]
    for use in answer["uses"]:
        held = use["held_by"] or "no checkpoint that is still there"
        lines.append(f"iteration {use['iteration']} made policy {use['makes_policy_version']}, in {held}")
    return "\n".join(lines)
