"""`replay prune | forget`: what is kept. Nothing is changed without --yes."""

from __future__ import annotations

from typing import Annotated

import sqlalchemy as sa
import typer

from agentloop.cli.options import AsJson
from agentloop.cli.replay.common import Filter, Run, app, fail, opened, say, say_json
from replay.questions import chosen
from replay.questions.filters import condition
from replay.storage.collecting.never_drawn import ALL_RUNS
from replay.storage.reclaimed import Forgotten
from replay.storage.retention import Capacity, Evicted

Yes = Annotated[bool, typer.Option("--yes", help="Do it; without it, only say what would be done.")]

_DRY = "nothing was changed; add --yes to do it"


@app.command(epilog='Example: agentloop replay prune --where "not success and staleness > 20"')
def prune(
    run: Run = None,
    filter: Filter = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Most rows kept; the oldest go first.")] = None,
    bytes: Annotated[int | None, typer.Option(min=1, help="Most bytes kept.")] = None,
    age: Annotated[int | None, typer.Option(min=1, help="Most iterations since a row was collected.")] = None,
    staleness: Annotated[int | None, typer.Option(min=1, help="Most publishes since it was sampled.")] = None,
    per_task: Annotated[int | None, typer.Option(min=1, help="Most rows of one task.")] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Evict rows for good: what stays of them is how they ended, and every update that used them."""
    capacity = Capacity(rows=rows, bytes=bytes, age=age, staleness=staleness, per_task=per_task)
    if (filter is None) == (not capacity):
        given = "neither" if filter is None else "both"
        fail(f"prune must be given --where or limits, got {given}. For example: agentloop replay prune --age 20")
    with opened(run, read_only=not yes) as buffer:
        picked = None if filter is None else condition(filter)
        # Limits are about the folder's run, and not what was imported into it; without one, about each run.
        run_id = buffer.run if filter is not None else buffer.own_run
        found = buffer.store.prune(run_id, rows=picked, capacity=capacity, dry_run=not yes)
    say_json({**vars(found), "done": yes}, indent=None) if as_json else say(_pruned_text(found, done=yes))


def _pruned_text(found: Evicted, *, done: bool) -> str:
    by_rule = ", ".join(f"{rule} {count:,}" for rule, count in found.by_rule.items())
    what = f"{found.rows:,} rows ({found.bytes / 1e6:.1f} MB)" + (f": {by_rule}" if by_rule else "")
    return f"evicted {what}" if done else f"would evict {what}\n{_DRY}"


@app.command(epilog="Example: agentloop replay forget --where \"'jane@example.org' in text\"")
def forget(
    filter: Annotated[str | None, typer.Option("--where", metavar="FILTER", help="What to forget.")] = None,
    run: Run = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="All episodes of evaluations, which no filter knows of.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove content for good: it is overwritten, and the file or the server's tables are rewritten.

    Ids and how they ended stay, so that lineage still names the updates that a forgotten trajectory fed.
    """
    if filter is None and not held_out:
        fail("forget must be given --where or --held-out, got neither. Name what to forget.")
    with opened(run, read_only=not yes) as buffer:
        rows = sa.false() if filter is None else chosen(buffer.run, filter)
        evaluated = (buffer.run or ALL_RUNS) if held_out else None
        found = buffer.store.forget(rows, held_out=evaluated, dry_run=not yes)
        text = _forgotten_text(found, done=yes, on_server=buffer.store.path is None)
    say_json({**vars(found), "done": yes}, indent=None) if as_json else say(text)


def _forgotten_text(found: Forgotten, *, done: bool, on_server: bool) -> str:
    what = f"the content of {found.trajectories:,} trajectories, {found.messages:,} messages, {found.tasks:,} tasks"
    what += f", {found.held_out:,} episodes of evaluations" if found.held_out else ""
    weights = f"{found.updates:,} updates used them: weights keep what they learned (agentloop replay lineage ID)"
    if not done:
        return f"would remove {what}\n{weights}\n{_DRY}"
    server = ", a server's backups and archived write-ahead logs" if on_server else ""
    return f"removed {what}\n{weights}\ncopies elsewhere (exports, reports{server}) are not touched"
