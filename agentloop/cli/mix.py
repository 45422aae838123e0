"""`agentloop replay mix`: what the next batches of a run would be made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from replay import queries
from replay.cli.common import AsJson, Run, RunId, opened, say
from replay.cli.tables import number, share, table
from replay.config import StoredConfig, TaskPool
from replay.locate import own_folder
from replay.mixing.mix_settings import SAME_TASK
from replay.queries.open_buffer import OpenBuffer, asked_run
from replay.queries.preview.forecast import Horizon, new_run
from replay.queries.preview.settings import WrongSettings

if TYPE_CHECKING:
    from agentloop.config import RunConfig
    from agentloop.config.sections.environments.shares import EnvironmentPart

_ROWS = ("id", "stale", "reward", "success", "share", "replayed", "task")
_BATCHES = ("iteration", "fraction", "planned", "replayed", "fresh", "short", "groups", "members replayed")


def mix(
    run: Run = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Configuration in place of the run's own; without RUN, of a run that begins with an empty buffer.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one key, for example --set replay.fraction=0.5."),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="How many batches.")] = Horizon.iterations,
    success: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Share of fresh episodes that succeed; as in the newest iteration when left out."
        ),
    ] = None,
    run_id: RunId = None,
    as_json: AsJson = False,
) -> None:
    """What the next batches of a run would be made of, by its settings or others. Nothing is drawn or changed.

    The next batch is that of the run's buffer: which rows can be drawn, which can't and why, and how they are spread.
    What later ones would find is assumed. Exit code 1 where the settings can't be used, or would end the run.
    """
    from agentloop.config.config_file import load_config, load_plain

    horizon, given = Horizon(iterations, success), overrides or []
    if config is not None and run is None:
        answer = new_run(_of_batches(load_config(config, given)), horizon)
    else:
        with opened(run) as buffer:
            id = asked_run(buffer, run_id)
            own = buffer.store.run(id).config
            settings = load_plain(own, given, source=f"run {id}") if config is None else load_config(config, given)
            answer = _of_run(buffer, id, settings, horizon)
    say(json.dumps(answer, indent=1) if as_json else "\n".join(_lines(answer)))
    raise typer.Exit(0 if answer["stopped"] is None else 1)


def _of_run(buffer: OpenBuffer, run: str, config: RunConfig, horizon: Horizon) -> queries.QueryResult:
    from agentloop.user_code import load_sampler

    replay = config.replay
    own_sampler = load_sampler(replay.sampler, 0, replay.sampler_options) if ":" in replay.sampler else None
    folder = own_folder(buffer.folder, run)
    try:
        return queries.preview(
            buffer.store, run, _of_batches(config), folder=folder, sampler=own_sampler, horizon=horizon
        )
    except WrongSettings as error:
        return {"errors": dict(error.errors), "stopped": str(error), "batches": []}


def _of_batches(config: RunConfig) -> StoredConfig:
    """What of a configuration decides about its batches, with the number of tasks where they are rows of a file."""
    counts = config.replay.unit in SAME_TASK or config.replay.per_task is not None
    pools = [_pool_of(part, counts=counts) for part in config.parts]
    pool = TaskPool(task_pool="unlimited" if "unlimited" in pools else sum(int(one) for one in pools))
    return StoredConfig(run=config.run, batch=config.batch, environment=pool, tasks=config.tasks, replay=config.replay)


def _pool_of(part: EnvironmentPart, *, counts: bool) -> int | Literal["unlimited"]:
    if part.tasks.data is None or not counts:
        return part.environment.task_pool
    from agentloop.environments.datasets import load_rows

    return len(load_rows(part.tasks).train)


def _lines(answer: Mapping[str, Any]) -> Iterator[str]:
    if "plan" in answer:
        yield from _next_batch(answer)
        yield ""
    if answer["batches"]:
        yield f"batches to come, where {share(answer['success'], 1)} of the fresh episodes succeed:"
        yield from _batches(answer["batches"])
    if answer["stopped"] is not None:
        yield f"stopped: {answer['stopped']}"


def _next_batch(answer: Mapping[str, Any]) -> Iterator[str]:
    plan, batch = answer["plan"], answer["batch"]
    yield f"iteration  {answer['iteration']}, policy {answer['policy_version']}"
    yield f"fresh      {plan['fresh']} in groups {_sizes(plan['groups'])}"
    yield f"replayed   {plan['replay']} of {plan['planned_replay']} planned ({share(plan['fraction'], 1)} configured)"
    yield ""
    yield table(["rule", "left", "left out"], [[s["rule"], str(s["left"]), str(s["out"])] for s in answer["funnel"]])
    yield from answer["empty_sources"]
    if not batch["rows"]:
        return
    for spread in answer["spreads"]:
        if spread["name"] in ("staleness", "reward"):
            bins = [[bin["label"], share(bin["batch"], 1), share(bin["buffer"], 1)] for bin in spread["bins"]]
            yield "\n" + table([spread["name"], "replayed rows", "all eligible rows"], bins)
    yield f"\n{'what the run would draw' if batch['exact'] else 'an example'}:"
    yield table(_ROWS, [_row(row) for row in batch["rows"]])


def _row(row: Mapping[str, Any]) -> list[str]:
    return [
        row["id"][:12],
        number(row["staleness"], 0),
        number(row["reward"], 3),
        "yes" if row["success"] else "no",
        number(row["probability"], 4),
        str(row["replayed"]),
        row["task"][:8],
    ]


def _batches(batches: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line each, and what they come to."""
    rows = [
        [
            str(batch["iteration"]),
            f"{batch['fraction']:.3f}",
            str(batch["planned_replay"]),
            str(batch["replay"]),
            str(batch["fresh"]),
            str(batch["shortfall"]),
            _sizes(batch["groups"]),
            _sizes(batch["members"]),
        ]
        for batch in batches
    ]
    yield table(_BATCHES, rows)
    planned, given, fresh = (sum(batch[name] for batch in batches) for name in ("planned_replay", "replay", "fresh"))
    whole = given + fresh
    yield f"replayed in all: {given:,} of {planned:,} planned, {share(given, whole)} of {whole:,} rows"


def _sizes(sizes: Sequence[tuple[int, int]]) -> str:
    """`12x8 3x7`: twelve of 8 and three of 7."""
    return " ".join(f"{count}x{size}" for size, count in sizes) or "-"
