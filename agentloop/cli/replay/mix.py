"""The command `agentloop replay mix`, which previews the next batch of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentloop.cli.options import AsJson, Overrides
from agentloop.cli.replay.common import Run, RunId, app, opened, say, say_json
from agentloop.cli.text_tables import row_table, yes_or_no
from context.wording import share
from replay.config import StoredConfig, TaskPool
from replay.locate import own_folder
from replay.mixing.mix_settings import SAME_TASK
from replay.next_batch import preview
from replay.open_buffer import OpenBuffer, find_run
from replay.questions import QueryResult

if TYPE_CHECKING:
    from agentloop.config import RunConfig
    from agentloop.config.sections.environments import EnvironmentPart


@app.command(epilog="Example: agentloop replay mix runs/quickstart-001 --set replay.fraction=0.5")
def mix(
    run: Run = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Configuration in place of the run's own.")
    ] = None,
    overrides: Overrides = None,
    run_id: RunId = None,
    as_json: AsJson = False,
) -> None:
    """What the next batch of a run would be made of, by its settings or others. Nothing is drawn or changed.

    Which rows can be drawn, which can't and why. A source that the run has not attached yet has no rows.
    """
    from agentloop.config.config_file import load_config, load_plain

    given = overrides or []
    with opened(run) as buffer:
        id = find_run(buffer, run_id)
        own = buffer.store.run(id).config
        settings = load_plain(own, given, source=f"run {id}") if config is None else load_config(config, given)
        answer = _preview(buffer, id, settings)
    say_json(answer) if as_json else say("\n".join(_lines(answer)))


def _preview(buffer: OpenBuffer, run: str, config: RunConfig) -> QueryResult:
    from agentloop.user_code import load_sampler

    replay = config.replay
    own_sampler = load_sampler(replay.sampler, 0, replay.sampler_options) if ":" in replay.sampler else None
    counts = replay.unit in SAME_TASK or replay.per_task is not None
    pools = [_pool_of(part, counts=counts) for part in config.parts]
    pool = TaskPool(task_pool="unlimited" if "unlimited" in pools else sum(map(int, pools)))
    asked = StoredConfig(
        run=config.run, batch=config.batch, context=config.context, environment=pool, tasks=config.tasks, replay=replay
    )
    return preview(buffer.store, run, asked, folder=own_folder(buffer.folder, run), sampler=own_sampler)


def _pool_of(part: EnvironmentPart, *, counts: bool) -> int | Literal["unlimited"]:
    """Return the number of tasks. If they are rows of a file, the rows are counted only if `counts` is True."""
    if part.tasks.data is None or not counts:
        return part.environment.task_pool
    from agentloop.environments.datasets import load_rows

    return len(load_rows(part.tasks).train)


def _lines(answer: Mapping[str, Any]) -> Iterator[str]:
    plan, batch = answer["plan"], answer["batch"]
    groups = " ".join(f"{count}x{size}" for size, count in plan["groups"]) or "-"
    if answer["ended"]:
        yield "The run has ended: a resume with more iterations, or without its target, would make this one."
        yield "Its schedule keeps the length that it began with."
    yield f"iteration  {answer['iteration']}, policy {answer['policy_version']}"
    yield f"fresh      {plan['fresh']} in groups {groups}"
    yield f"replayed   {plan['replay']} of {plan['planned_replay']} planned ({share(plan['fraction'], 1)} configured)"
    yield ""
    yield row_table(answer["rules"], {"rule": "rule", "left": ("left", 0), "left out": ("out", 0)})
    yield from answer["empty_sources"]
    if not batch["rows"]:
        return
    yield f"\n{'what the run would draw' if batch['exact'] else 'an example'}:"
    yield row_table(
        batch["rows"],
        {
            "id": lambda row: row["id"][:12],
            "stale": ("staleness", 0),
            "reward": ("reward", 3),
            "success": yes_or_no("success"),
            "probability": ("probability", 4),
            "replayed": "replayed",
            "task": lambda row: row["task"][:8],
        },
    )
