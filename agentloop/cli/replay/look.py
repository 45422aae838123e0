"""The commands `replay stats | ls | show | tasks | lineage`, which show rows and the updates that used them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agentloop.cli.options import AsJson
from agentloop.cli.replay.common import Filter, Run, RunId, app, opened, say, say_json
from agentloop.cli.replay.token_view import token_view
from agentloop.cli.text_tables import (
    REQUESTS,
    Cell,
    counted,
    number,
    quoted,
    row_table,
    state_text,
    yes_or_no,
)
from context.authors import AuthorTable
from context.wording import error_counts, excerpt, share, visible
from replay import questions
from replay.locate import tokenizer
from replay.open_buffer import OpenBuffer, find_run
from replay.questions import Sort, TaskSort
from replay.questions.outliers import duplicates
from replay.records import REMOVED_TASK

_ENDLESS = questions.Patience(rows=2**62, seconds=math.inf)
"""No limit: a user in a terminal can end a search."""
_LONGEST_PAYLOAD = 2_000
"""Most characters of a payload that are shown. --json has all of them."""


@app.command(epilog="Example: agentloop replay stats runs/quickstart-001")
def stats(run: Run = None, filter: Filter = None, as_json: AsJson = False) -> None:
    """What is in the buffer, and what was drawn from it."""
    with opened(run) as buffer:
        answer = questions.summary(buffer.store, buffer.run, filter=filter)
        if filter is None:
            answer["equal_tokens"] = duplicates(buffer.store, buffer.run)
    say_json(answer) if as_json else say(_summary_text(answer))


@app.command(epilog="Example: agentloop replay ls --where \"success and tool == 'lookup'\" --sort num_tokens")
def ls(
    run: Run = None,
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="FILTER",
            help="Only these, for example \"reward > 0.5 and staleness < 8 and tool == 'lookup'\"; all of several.",
        ),
    ] = None,
    success: Annotated[bool | None, typer.Option("--success/--failed", help="Only these; both when left out.")] = None,
    sort: Annotated[Sort, typer.Option(help="The greatest come first.")] = Sort.iteration,
    ascending: Annotated[bool, typer.Option("--ascending", help="The least come first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most rows printed.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List trajectories, one line each."""
    chosen = [*(filters or ()), *([] if success is None else [f"success == {success}"])]
    with opened(run) as buffer:
        asked = questions.Query(buffer.run, chosen, sort, ascending)
        answer = questions.page(buffer.store, asked, limit=limit, patience=_ENDLESS)
    rows = answer["rows"]
    cells = _LISTED | (_LABELS if any(row["labels"] for row in rows) else {})
    say_json(rows) if as_json else say(row_table(rows, cells) if rows else "no trajectories")
    if answer["after"]:
        say("there are further rows: raise --limit", error=True)


@app.command(epilog="Example: agentloop replay show 3f9a21 runs/quickstart-001")
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="A trajectory's id, or the beginning of it.")],
    run: Run = None,
    as_json: AsJson = False,
) -> None:
    """One trajectory: every token with its author and mask, its log-probs, and every update that used it."""
    if run is not None and ("://" in id or Path(id).exists()):
        id, run = run, id  # other commands have RUN first
    with opened(run) as buffer:
        answer = questions.trajectory(buffer.store, id)
        for use in answer["uses"]:
            use["held_by"] = _first_holding(buffer.folder, use["iteration"])
        if as_json:
            say_json(answer)
            return
        say(_facts_text(answer))
        if answer["requests"]:
            say("\nrequests of its agent's session:\n" + row_table(answer["requests"], REQUESTS))
        if answer["segments"]:
            _print_tokens(buffer, answer["id"])
        else:
            say("its tokens are gone")
        say("every update that used it:\n" + _uses_text(answer["uses"]))


def _summary_text(answer: dict[str, Any]) -> str:
    drawn, known = answer["draws"], answer["staleness"]
    staleness = "not known of any row that can be drawn"
    if known["known"]:
        rows = counted(known["known"], "row")
        staleness = f"{number(known['mean'], 1)} on average, {known['max']:,} at most, of {rows} that can be drawn"
    lines = [
        f"{answer['database']}  ({answer['bytes'] / 1e6:.1f} MB)",
        f"iterations    {answer['iterations']:,}, policies {answer['policies']:,}, runs {answer['runs']:,}",
        f"trajectories  {answer['trajectories']:,} in {counted(answer['groups'], 'group')}"
        f" of {counted(answer['tasks'], 'task')}, {answer['groups_without_signal']:,} of equal rewards: no signal",
        *(
            f"  {visible(name):<12}{row['trajectories']:,}, {share(row['successes'], row['trajectories'])} successful"
            for parts in (answer["states"], answer["sources"] if len(answer["sources"]) > 1 else {})
            for name, row in parts.items()
        ),
        *([f"  gone        {answer['reclaimed']:,}: evicted, with a few numbers left"] if answer["reclaimed"] else []),
        f"tokens        {answer['tokens']:,}, of which sampled {answer['action_tokens']:,}",
        f"success       {share(answer['successes'], answer['episodes'])} of {counted(answer['episodes'], 'episode')}"
        f"   reward {number(answer['reward_mean'], 3)}   turns {number(answer['turns_mean'], 1)}",
        f"staleness     {staleness}",
        "stopped by    " + ", ".join(f"{visible(why)} {count:,}" for why, count in answer["stop_reasons"].items()),
        f"updates used  {drawn['fresh']:,} fresh, {drawn['replay']:,} replayed"
        f" ({drawn['trajectories_replayed']:,} different), {drawn['reserved']:,} reserved",
        f"  replayed    staleness {number(drawn['staleness_mean'], 1)} (most {number(drawn['staleness_max'], 0)}),"
        f" drift {number(drawn['row_drift_mean'], 3)} per row, largest gap {number(drawn['token_gap_max'], 3)} nats",
    ]
    if equal := answer.get("equal_tokens"):
        lines += [
            f"equal tokens  {counted(equal['rows'], 'row')}, {equal['different']:,} different token sequences,"
            f" the most frequent {equal['most_stored']:,} times",
            f"  replayed    {counted(equal['replays'], 'draw')}, {counted(equal['rows_replayed'], 'different row')},"
            f" {equal['different_replayed']:,} different token sequences, one used {equal['most_used']:,} times",
        ]
    return "\n".join(lines)


def _share_of(name: str) -> Cell:
    return lambda row: "-" if row[name] is None else share(row[name], 1)


_LISTED: dict[str, Cell] = {
    "id": lambda row: row["id"][:12],
    "iter": "iteration",
    "task": lambda row: row["task"][:8],
    "reward": lambda row: f"{row['reward']:g}",
    "success": yes_or_no("success"),
    "turns": "num_turns",
    "tools": "num_tool_calls",
    "errors": lambda row: error_counts(row["error_kinds"]),
    "tokens": "num_tokens",
    "stop": "stop_reason",
    "advantage": lambda row: f"{row['advantage']:+.2f}",
    "uses": "uses",
    "stale": ("staleness", 0),
    "drift": ("drift", 3),
    "gap": ("token_gap_max", 2),
    "state": "state",
    "prompt": quoted("prompt", 48),
    "last answer": quoted("answer", 32),
}
_LABELS: dict[str, Cell] = {"labels": lambda row: ", ".join(row["labels"]) or "-"}
_USES: dict[str, Cell] = {
    "iter": "iteration",
    "slot": "slot",
    "stream": "stream",
    "probability": ("probability", 4),
    "stale": ("staleness", 0),
    "advantage": ("advantage", 3),
    "drift": ("drift_mean", 4),
    "gap": ("token_gap_max", 3),
    "weight share": ("ess_share", 4),
    "kl": ("approx_kl", 5),
    "clipped": ("clip_fraction", 3),
}


def _uses_text(uses: Sequence[dict[str, Any]]) -> str:
    if not uses:
        return "no update used it"
    held = [
        f"iteration {use['iteration']} made policy {use['makes_policy_version']}, in "
        f"{use['held_by'] or 'no checkpoint that is still there'}"
        for use in uses
    ]
    return "\n".join([row_table(uses, _USES), *held])


def _print_tokens(buffer: OpenBuffer, id: str) -> None:
    (trajectory,) = buffer.store.read([id])
    authors = AuthorTable.from_json(buffer.store.run(trajectory.record.run).authors)
    decoder, console = tokenizer(buffer.folder), Console(highlight=False, soft_wrap=True)
    if decoder is None:
        say("token ids, for want of start/tokenizer.json in the run folder:")
    for position, segment in enumerate(trajectory.segments):
        say(f"\nsegment {position} ({visible(segment.reason)}), log-probs in nats after every sampled token\n")
        console.print(token_view(segment.tokens, authors, decoder))


def _facts_text(answer: dict[str, Any]) -> str:
    """Write a line for each kind of fact. An evicted row has fewer."""
    group, task, row = answer["group"], answer["task"], answer["record"] or answer["reclaimed"]
    known = None if task["payload"] == REMOVED_TASK else json.loads(task["payload"])
    payload = known if known is None else json.dumps(known, ensure_ascii=False)
    made_from = [f"from {row['parent']}"] if row["parent"] else []
    lines = [
        ("trajectory", answer["id"], state_text(answer), f"source {row['source']}", *made_from),
        ("collected", f"iteration {row['iteration']}", f"slot {row['slot']}", f"policy {row['policy_version_min']}"),
        (
            "group",
            f"member {row['member'] + 1} of {group['size']}",
            f"{share(group['success_rate'], 1)} successful",
            f"reward {group['reward_mean']:g} on average",
        ),
        ("task", task["hash"][:16], task["environment"]),
        ("payload", "gone with the last row of the task" if payload is None else excerpt(payload, _LONGEST_PAYLOAD)),
        (
            "outcome",
            f"reward {row['reward']:g}",
            "success" if row["success"] else "no success",
            f"advantage {row['advantage']:+.3f}",
        ),
    ]
    rewards = [said["reward"] for said in answer["messages"] if said["role"] == "assistant"]
    if any(reward is not None for reward in rewards):
        lines.append(("of replies", "rewards " + " ".join("-" if each is None else f"{each:g}" for each in rewards)))
    if answer["record"]:
        means, least = number(row["mean_behavior_log_prob"], 3), number(row["min_behavior_log_prob"], 3)
        entropy = number(row["mean_entropy"], 3)
        lines += [
            ("ended by", row["stop_reason"]),
            ("length", f"{row['num_turns']} turns", f"{row['num_tool_calls']} tool calls"),
            ("errors", error_counts(row["error_kinds"])),
            *([("of agents", row["agent_rewards"])] if row["agent_rewards"] else []),
            ("tokens", str(row["num_tokens"]), f"{row['num_action_tokens']} sampled"),
            ("sampling", f"temperature {row['temperature']:g}", f"entropy {entropy} nats"),
            ("log-probs", f"mean {means}", f"least {least}"),
        ]
    if answer["children"]:
        lines.append(("made from it", *answer["children"]))
    for label in answer["labels"]:
        note = [] if label["note"] is None else [repr(label["note"])]
        lines.append(("labelled", label["label"], *note, f"by {label['made_by']}", label["created_at"][:10]))
    return "\n".join(f"{title:<12}" + ", ".join(map(visible, facts)) for title, *facts in lines)


@app.command(epilog="Example: agentloop replay tasks runs/quickstart-001 --sort replayed")
def tasks(
    run: Run = None,
    sort: Annotated[
        TaskSort, typer.Option(help="What comes first: those that never succeeded, or the greatest of a column.")
    ] = TaskSort.unsolved,
    ascending: Annotated[bool, typer.Option("--ascending", help="The least come first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most tasks printed.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List tasks: first, latest and best success, groups without a signal, how often rows were replayed and drifted."""
    with opened(run) as buffer:
        answer = questions.task_list(buffer.store, buffer.run, sort=sort, ascending=ascending, limit=limit)
    say_json(answer) if as_json else say(_tasks_text(answer))


def _tasks_text(answer: dict[str, Any]) -> str:
    if not answer["rows"]:
        return "no tasks"
    shown, known = len(answer["rows"]), answer["tasks"]
    lines = [f"{counted(known, 'task')} tried, {answer['never_solved']:,} never solved", ""]
    lines += [row_table(answer["rows"], _TASKS)]
    return "\n".join([*lines, f"{known - shown:,} more: add --limit {known}"] if known > shown else lines)


_TASKS: dict[str, Cell] = {
    "task": lambda row: row["hash"][:12],
    "attempts": "attempts",
    "solved": "successes",
    "success": lambda row: share(row["successes"], row["attempts"]),
    **{name: _share_of(f"{name}_success") for name in ("first", "latest", "best")},
    "trend": lambda row: "-" if row["trend"] is None else f"{100 * row['trend']:+.0f}",
    "groups": "num_groups",
    "no signal": "groups_without_signal",
    "last": "latest_iteration",
    "replayed": "replayed",
    "drift": ("row_drift_mean", 3),
    "gap": ("token_gap_max", 2),
    "prompt": quoted("prompt", 60),
}


@app.command(epilog="Example: agentloop replay lineage 12")
def lineage(
    iteration: Annotated[int, typer.Argument(metavar="ITERATION", min=0, help="Its number, from 1 on.")],
    run: Run = None,
    run_id: RunId = None,
    as_json: AsJson = False,
) -> None:
    """Which experience fed the update of an iteration, and how far it had drifted when it did."""
    with opened(run) as buffer:
        answer = questions.iteration(buffer.store, find_run(buffer, run_id), iteration)
        answer["checkpoint"] = _first_holding(buffer.folder, answer["iteration"])
    say_json(answer) if as_json else say(_iteration_text(answer))


def _first_holding(folder: Path | None, iteration: int) -> str | None:
    """Return the oldest existing checkpoint whose weights have learned from this iteration."""
    from agentloop.runs.run_folder import complete_checkpoints  # here, because other commands need no configuration

    found = [] if folder is None else complete_checkpoints(folder / "checkpoints")
    return next((str(checkpoint) for checkpoint in found if int(checkpoint.name) >= iteration), None)


_FED: dict[str, Cell] = {
    "slot": "slot",
    "stream": "stream",
    "id": lambda row: row["trajectory"][:12],
    "from": lambda row: str(row["collected_iteration"]) if row["collected_run"] == row["run"] else row["source"],
    "probability": ("probability", 4),
    "stale": ("staleness", 0),
    "reward": lambda row: f"{row['reward']:g}",
    "advantage": ("advantage", 3),
    "drift": ("drift_mean", 4),
    "weight share": ("ess_share", 4),
    "clipped": ("clip_fraction", 3),
    "state": state_text,
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
