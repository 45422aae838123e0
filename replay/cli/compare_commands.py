"""`replay diff | lineage`: two of them side by side, and which experience fed which update."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from context.visible import visible
from replay import queries
from replay.cli.common import AsJson, Run, RunId, app, fail, opened, say
from replay.cli.show import uses_text
from replay.cli.tables import Cell, number, row_table, share, state_text, table
from replay.locate import tokenizer
from replay.queries import compare
from replay.queries.iteration import lineage_up_to
from replay.queries.open_buffer import OpenBuffer, asked_run
from replay.queries.trajectory import lineage_of

_CONTEXT = 8
"""Tokens shown before the first one that differs."""
_COMPLETE = "COMPLETE"
"""Marks whole checkpoints; see agentloop.runs.checkpoint."""


@app.command(epilog="Example: agentloop replay diff 3f9a21 b07c44")
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A trajectory's id or the beginning of it, or a run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.")],
    run: Run = None,
    as_json: AsJson = False,
) -> None:
    """Two trajectories of RUN: where their tokens part, and their records; or two runs: their buffers in numbers."""
    if all("://" in name or os.path.exists(name) for name in (a, b)):
        with ExitStack() as stack:
            pair = [stack.enter_context(opened(name)) for name in (a, b)]
            answer = compare.buffers((pair[0].store, pair[1].store), (pair[0].run, pair[1].run))
        say(json.dumps(answer, indent=1) if as_json else _buffers_text(answer))
        return
    with opened(run) as buffer:
        answer = compare.trajectories(buffer.store, a, b)
        say(json.dumps(answer, indent=1) if as_json else _trajectories_text(buffer, answer))


def _buffers_text(answer: dict[str, Any]) -> str:
    numbers = [[name, _plain(a), _plain(b)] for name, (a, b) in answer["numbers"].items() if a != b]
    config = [[name, json.dumps(a), json.dumps(b)] for name, (a, b) in answer["config"].items()]
    parts = [table(["what differs", "A", "B"], numbers) if numbers else "the same numbers"]
    parts += ["", table(["configuration", "A", "B"], config)] if config else []
    return "\n".join(parts)


def _trajectories_text(buffer: OpenBuffer, answer: dict[str, Any]) -> str:
    records = [[name, *(_plain(value) for value in answer["records"][name])] for name in answer["different"]]
    lines = [table(["what differs", "A", "B"], records) if records else "the same record"]
    for segment in answer["segments"]:
        lines += ["", f"segment {segment['position']}: {' and '.join(f'{n:,}' for n in segment['tokens'])} tokens"]
        gap = segment["log_prob_gap"]
        shown = f", log-probs at most {gap:.4f} nats apart" if gap is not None else ""
        lines.append(f"  the first {segment['same']:,} are the same{shown}")
        if segment["first_difference"] is not None:
            lines += _first_difference_text(buffer, answer["ids"], segment)
    message = answer["first_different_message"]
    lines += ["", "the same messages" if message is None else f"message {message} is the first that differs"]
    return "\n".join(lines)


def _first_difference_text(buffer: OpenBuffer, ids: Sequence[str], segment: dict[str, Any]) -> list[str]:
    index = segment["first_difference"]["index"]
    decoder = tokenizer(buffer.folder)

    def text(token_ids: Sequence[int]) -> str:
        return repr(decoder.decode(list(token_ids))) if decoder else " ".join(map(str, token_ids))

    rows = {row.id: row for row in buffer.store.read(list(dict.fromkeys(ids)))}
    longest = next(row for row in rows.values() if len(row.segments) > segment["position"])
    before = longest.segments[segment["position"]].tokens.token_ids[max(0, index - _CONTEXT) : index].tolist()
    lines = [f"  ... {text(before)}"] if before else []
    for name, token in zip("AB", segment["first_difference"]["tokens"], strict=True):
        if token is None:
            lines.append(f"  {name} > ends before token {index}")
        else:
            facts = (
                f"token {index}, id {token['token_id']}, by {token['author']}, log-prob {number(token['log_prob'], 3)}"
            )
            lines.append(f"  {name} > {text([token['token_id']])}  ({facts})")
    return lines


def _plain(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)


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
            answer = queries.iteration(buffer.store, asked_run(buffer, run_id), int(what))
            answer["checkpoint"] = _first_holding(buffer.folder, answer["iteration"])
            text = _iteration_text(answer)
        elif run_id is not None:
            fail(f"--run must be left out for a trajectory, whose id is of one run, got {run_id}. WHAT was {what}.")
        else:
            answer = lineage_of(buffer.store, what)
            for use in answer["uses"]:
                use["held_by"] = _first_holding(buffer.folder, use["iteration"])
            text = _trajectory_text(answer)
    say(json.dumps(answer, indent=1) if as_json else text)


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
    return "\n".join(lines)


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
