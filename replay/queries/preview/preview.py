"""What the next batch of a run would be under chosen replay settings: planned as a run plans it, drawn as it draws.

The run, its database and its sampler stay as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from replay import declared
from replay.errors import ReplayError
from replay.mixing.mixer import BatchPlan, Mixer, ReplayStarved
from replay.mixing.request import Availability, DrawRequest
from replay.mixing.schedule import progress_at
from replay.queries.filters.question import Answer
from replay.queries.preview.batch_distributions import spreads
from replay.queries.preview.run_state import Standing, saved_mixer, standing, upcoming_tasks
from replay.queries.preview.settings import CONTROLS, Choice, choose, options_of, sampler_of
from replay.records import ELIGIBLE, STATES, RunRecord
from replay.sampling.samplers import SAMPLERS
from replay.sampling.selection import Chosen
from replay.sampling.trial_draw import Rehearsal
from replay.storage.format.schema import IMPORTED, trajectories
from replay.store import ReplayStore

_MOST_DRAWS = 32
_FEWEST_DRAWS = 8
_MOST_ROWS = 1024
"""Of all example draws together, as far as there may be fewer draws."""


_rows = trajectories.c


@dataclass
class _Drawn:
    """Example draws of one plan; the first is the example that is shown."""

    rehearsal: Rehearsal
    standing: Standing
    draws: list[list[Chosen]]

    @property
    def ids(self) -> list[list[str]]:
        return [[self.rehearsal.index.ids[row.position] for row in rows] for rows in self.draws]


def preview(
    store: ReplayStore, run: str | None = None, given: Mapping[str, str] | None = None, *, folder: Path | None = None
) -> Answer:
    """The next batch of `run` (None: the only one), where `given` takes the place of its own settings.

    `given`: texts by control, as in `settings.choose`; what is wrong with them stands in `errors`, and then there is
    no `plan`. `folder`: the run's, whose checkpoint knows what earlier iterations rounded off.
    """
    record = store.run(run)
    stored = _declared(record)
    with store.reading() as connection:
        now = standing(connection, record.id)
        gone = connection.scalar(_GONE.where(_rows.run == record.id)) or 0
    scheduled = _scheduled(stored, now.iteration)
    choice = choose(stored, given or {}, scheduled=scheduled)
    replay = choice.config["replay"]
    answer: Answer = {
        "run": record.id,
        "iteration": now.iteration,
        "policy_version": now.policy_version,
        "settings": {name: replay[name] for name in (*CONTROLS, "sampler_options")},
        "own": {name: stored["replay"][name] for name in (*CONTROLS, "sampler_options")} | {"fraction": scheduled},
        "options": options_of(replay["sampler"]) if replay["sampler"] in SAMPLERS else [],
        "errors": dict(choice.errors),
        "yaml": choice.yaml,
        **dict.fromkeys(("plan", "funnel", "batch", "spreads")),
    }
    return answer if choice.errors else answer | _tried(store, choice, now, folder, gone)


def rows_to_read(store: ReplayStore, run: str) -> int:
    """About how many rows a `preview` of the run has to read into memory; 0 while they are there."""
    if store.has_read(run):
        return 0
    with store.reading() as connection:
        mine = (_rows.run == run) | sa.text(IMPORTED)
        return connection.scalar(sa.select(sa.func.count()).where(_rows.state == ELIGIBLE, mine)) or 0


# Named one by one, for an index to find them: rows that are not eligible are few.
_GONE = sa.select(sa.func.count()).where(_rows.state.in_([state for state in STATES if state != ELIGIBLE]))


def _declared(run: RunRecord) -> declared.Config:
    """What its stored configuration says of its batches; anybody may have written there."""
    try:
        stored = declared.completed(run.config)
        for part, defaults in declared.DEFAULTS.items():
            for name, default in defaults.items():
                if not _is_like(stored[part][name], default):
                    raise TypeError(f"{part}.{name}={stored[part][name]!r}")
        declared.mix_rule(stored)
        declared.limits(stored["replay"])
    except (AttributeError, TypeError, ValueError) as error:
        raise ReplayError(
            f"configuration of run {run.id} must be one that a run was started with, got one with {error!r:.200}. "
            "Ask for another run."
        ) from error
    return stored


def _is_like(value: Any, default: Any) -> bool:
    """Whether it can stand where the default stands; numbers may take the place of None and of texts."""
    if isinstance(default, bool | list | tuple | dict):
        kinds: tuple[type, ...] = (list, tuple) if isinstance(default, list | tuple) else (type(default),)
        return isinstance(value, kinds)
    if isinstance(value, bool):
        return False
    numbers = (int,) if type(default) is int else (int, float)
    if default is None:
        return value is None or isinstance(value, (*numbers, str))
    return isinstance(value, numbers if isinstance(default, int | float) else (str, int))


def _scheduled(config: declared.Config, iteration: int) -> float:
    """The fraction of the next iteration; the declared one once the run is over, whose schedule may end at none."""
    iterations: int = config["run"]["iterations"]
    fraction: float = config["replay"]["fraction"]
    if iteration > iterations:
        return fraction
    return declared.mix_rule(config).fraction.at(iteration, progress_at(iteration, iterations))


def _tried(store: ReplayStore, choice: Choice, now: Standing, folder: Path | None, gone: int) -> Answer:
    config = choice.config
    rule, limits = declared.mix_rule(config), declared.limits(config["replay"])
    sampler = sampler_of(config, config["run"]["seed"])
    goes_on = now.go_on(sampler)
    saved = saved_mixer(folder, now.iteration - 1, unit=rule.unit)
    mixer = now.mixer(rule, saved)
    request = DrawRequest(now.run, now.iteration, now.policy_version, limits=limits)
    with ExitStack() as open_until_told:
        try:
            rehearsal, connection = open_until_told.enter_context(
                store.rehearsing(request, sampler, sources=list(rule.sources))
            )
        except ValueError as error:
            # Options can be so large or so small that no weight is left that is a number.
            given = json.dumps(config["replay"]["sampler_options"])
            return {"errors": {"sampler_options": f"replay.sampler_options must suit these rows, got {given}: {error}"}}
        tasks = upcoming_tasks(connection, now.run, mixer.num_tasks, config["environment"]["task_pool"])
        try:
            available = rehearsal.available()
            progress = progress_at(now.iteration, config["run"]["iterations"])
            plan = mixer.plan(iteration=now.iteration, progress=progress, available=available, tasks=tasks)
        except ReplayError as error:
            starved = isinstance(error, ReplayStarved)
            return {"errors": {"fraction" if starved else "sources": str(error)}}
        times = max(_FEWEST_DRAWS, min(_MOST_DRAWS, _MOST_ROWS // max(1, plan.replay)))
        drawn = _Drawn(rehearsal, now, rehearsal.draws(plan.picks, times) if plan.replay else [])
        return {
            "plan": _plan(plan, mixer, available, tasks=tasks, exact=saved is not None),
            "funnel": _funnel(rehearsal, available, gone, mixer, tasks),
            "batch": _batch(drawn, exact=goes_on and saved is not None and _is_foretold(mixer, config["replay"])),
            "spreads": spreads(rehearsal.index, [[row.position for row in rows] for rows in drawn.draws], now),
        }


def _is_foretold(mixer: Mixer, replay: Mapping[str, Any]) -> bool:
    """Whether what is drawn does not hang on the tasks to come, which are guessed, or on how they will be solved."""
    return not mixer.num_tasks and not replay["complete_zero_variance"] and replay["retire_solved"] is None


def _plan(plan: BatchPlan, mixer: Mixer, available: Availability, *, tasks: Sequence[str], exact: bool) -> Answer:
    sizes = Counter(size for _, size in plan.groups)
    return {
        "trajectories": mixer.rule.trajectories,
        "group_size": mixer.rule.group_size,
        "observes": mixer.rule.mode == "observe",
        "fraction": plan.fraction,
        "factor": mixer.factor,
        "started": mixer.started,
        "planned_fresh": plan.planned_fresh,
        "planned_replay": plan.planned_replay,
        "fresh": plan.fresh,
        "replay": plan.replay,
        "shortfall": plan.shortfall,
        "starved_groups": plan.starved_groups,
        "groups": [[size, count] for size, count in sorted(sizes.items(), reverse=True)],
        "picks": [asdict(pick) for pick in plan.picks],
        "assumed_tasks": len(tasks),
        "new_tasks": tasks.count(""),
        "unknown_priority": available.unknown_priority,
        "incomparable": dict(available.incomparable),
        "remainders": exact,
    }


def _funnel(
    rehearsal: Rehearsal, available: Availability, gone: int, mixer: Mixer, tasks: Sequence[str]
) -> list[Answer]:
    """How many rows are left after each rule, from all that the run stored and others that it may draw.

    `gone`: rows of the run that are not eligible.
    """
    steps = [(left.rule, left.rows) for left in rehearsal.left()]
    steps.insert(0, ("stored", steps[0][1] + gone))
    drawable = steps[-1][1]
    if available.rows < drawable:
        steps.append(("caps", available.rows))
    if mixer.rule.unit == "group":
        size = mixer.rule.group_size
        steps.append(("groups", size * available.groups.get(size, 0)))
    elif mixer.num_tasks:
        steps.append(("tasks", sum(available.by_task.get(task, 0) for task in set(tasks))))
    before = [steps[0][1], *(rows for _, rows in steps)]
    return [{"rule": rule, "left": rows, "out": last - rows} for (rule, rows), last in zip(steps, before, strict=False)]


def _batch(drawn: _Drawn, *, exact: bool) -> Answer:
    """The first example, row by row, and what all of them have in common.

    `exact`: the run goes on from just this moment, so that these are the rows it would draw.
    """
    columns, codes = drawn.rehearsal.index.columns, drawn.rehearsal.index.codes
    example = drawn.draws[0] if drawn.draws else []
    ids = drawn.ids[0] if drawn.draws else []

    def of(row: Chosen, id: str) -> Answer:
        at = row.position
        own = bool(columns["own"][at])
        names = {name: codes[name].names[int(columns[name][at])] for name in ("run", "source", "task", "group")}
        return {
            "id": id,
            **names,
            "iteration": int(columns["iteration"][at]),
            "staleness": drawn.standing.policy_version - int(columns["policy_version"][at]) if own else None,
            "reward": float(columns["reward"][at]),
            "success": bool(columns["success"][at]),
            "advantage": float(columns["advantage"][at]),
            "probability": row.probability,
            "replayed": int(columns["uses"][at]),
        }

    def different(name: str) -> float | None:
        counts = [len({int(columns[name][row.position]) for row in rows}) for rows in drawn.draws]
        return float(np.mean(counts)) if counts else None

    return {
        "exact": exact,
        "draws": len(drawn.draws),
        "rows": [of(row, id) for row, id in zip(example, ids, strict=True)],
        "tasks_mean": different("task"),
        "groups_mean": different("group"),
    }
