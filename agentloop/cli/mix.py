"""`agentloop replay mix`: the batches a configuration would compose."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay.cli.tables import share, table
from replay.mixing.mixer import BatchPlan, ReplayStarved

if TYPE_CHECKING:
    from agentloop.config import RunConfig


def mix(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="Run folder to go on from; an empty buffer when left out."),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
    success: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of fresh episodes that is assumed to succeed.")
    ] = 0.5,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one key, for example --set replay.unit=group."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """The batches a configuration would compose, iteration by iteration. Nothing is collected, drawn or changed.

    With RUN the first one is what that run would do next; what later ones would find in the buffer is assumed.
    Exit code 1 where replay.shortfall: error would end the run.
    """
    from agentloop.config.config_file import load_config
    from agentloop.training.dry_run import DryRun

    settings = load_config(config, overrides or [])
    forecast = DryRun.from_nothing(settings) if run is None else DryRun.from_run(settings, run)
    plans: dict[int, BatchPlan] = {}
    stopped: str | None = None
    try:
        for iteration, plan in forecast.plans(iterations, success=success):
            plans[iteration] = plan
    except ReplayStarved as error:
        stopped = str(error)
    if as_json:
        batches = [_as_json(iteration, plan) for iteration, plan in plans.items()]
        answer = {"batches": batches, "success": success, "same_rule": forecast.same_rule, "stopped": stopped}
        print(json.dumps(answer, indent=1))
    else:
        if not forecast.same_rule:
            print(f"{run} mixes by another rule: this one begins here, without its remainders and what had started it")
        print(_as_text(plans, settings))
        if stopped is not None:
            print(f"stopped: {stopped}")
    raise typer.Exit(1 if stopped else 0)


def _as_json(iteration: int, plan: BatchPlan) -> dict[str, Any]:
    numbers = {name: getattr(plan, name) for name in ("fresh", "replay", "shortfall")}
    return {"iteration": iteration, **numbers, **asdict(plan)}


def _as_text(plans: Mapping[int, BatchPlan], config: RunConfig) -> str:
    trajectories, observed = config.batch.trajectories, config.replay.mode == "observe"
    rows = [
        [
            str(iteration),
            f"{plan.fraction:.3f}",
            f"{plan.planned_replay / trajectories:.3f}",
            f"{plan.replay / (plan.fresh + (0 if observed else plan.replay)):.3f}",
            str(plan.fresh),
            str(plan.replay),
            str(plan.shortfall),
            _sizes([size for _, size in plan.groups]),
            _sizes([pick.count for pick in plan.picks]) if any(pick.task for pick in plan.picks) else "-",
        ]
        for iteration, plan in plans.items()
    ]
    titles = ["iteration", "configured", "ruled", "achieved", "fresh", "replay", "short", "groups", "members replayed"]
    declared = sum(plan.fraction for plan in plans.values()) * trajectories
    ruled = sum(plan.planned_replay for plan in plans.values())
    given = sum(plan.replay for plan in plans.values())
    whole = trajectories * len(plans)
    closing = (
        f"replayed in all: configured {declared:,.1f} ({share(declared, whole)}), ruled {ruled:,} "
        f"({share(ruled, whole)}), achieved {given:,} ({share(given, whole)})"
    )
    return f"{table(titles, rows)}\n{closing}" if rows else closing


def _sizes(sizes: Sequence[int]) -> str:
    """`12x8 3x7`: twelve of 8 and three of 7."""
    return " ".join(f"{count}x{size}" for size, count in sorted(Counter(sizes).items(), reverse=True)) or "-"
