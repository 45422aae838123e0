"""What the next batches of a run would be made of: planned as a run plans them, drawn as it draws.

The run, its database and its sampler stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import numpy as np
import sqlalchemy as sa

from replay.config import StoredConfig, stored_config
from replay.errors import ReplayError
from replay.mixing.batch_plan import BatchPlan
from replay.mixing.mixer import Mixer
from replay.mixing.request import Availability, DrawRequest
from replay.mixing.schedule import Schedule
from replay.queries.filters.query import QueryResult
from replay.queries.preview.batch_distributions import spreads
from replay.queries.preview.forecast import ExpectedTasks, Horizon, batches, forecast, numbers
from replay.queries.preview.run_state import RunState, run_state, saved_mixer, tried_tasks
from replay.queries.preview.settings import as_yaml, shown, wrong
from replay.records import ELIGIBLE, STATES
from replay.sampling.samplers import SAMPLERS, RankedSampler, Sampler, make_sampler
from replay.sampling.selection import SelectedRow
from replay.sampling.trial_draw import TrialDraw
from replay.storage.format.schema import IMPORTED, trajectories
from replay.store import ReplayStore

_MOST_DRAWS = 32
_FEWEST_DRAWS = 8
_MOST_ROWS = 1024
"""Rows of all example draws together, as far as there may be fewer draws."""

_rows = trajectories.c


def preview(
    store: ReplayStore,
    run: str | None = None,
    config: StoredConfig | None = None,
    *,
    folder: Path | None = None,
    sampler: Sampler | None = None,
    horizon: Horizon = Horizon(),  # noqa: B008  frozen
) -> QueryResult:
    """The next batches of `run` (None: the only one), by `config` in place of its own configuration.

    `folder`: the run's, whose checkpoint knows what earlier iterations rounded off. `sampler`: one of a person's own,
    for its file is not run here. Raises WrongSettings for what no batch can be made by.
    """
    record = store.run(run)
    config = config or stored_config(record)
    with store.reading() as connection:
        now = run_state(connection, record.id)
        gone = connection.scalar(_GONE.where(_rows.run == record.id)) or 0
        tasks = ExpectedTasks.of(config, tried_tasks(connection, record.id))
    sampler = sampler or _built_in(config)
    if isinstance(sampler, RankedSampler) and sampler.measured:
        raise wrong("replay.sampler_options.policy must be stored where no policy is loaded, got current.")
    goes_on = now.go_on(sampler)
    mixer, is_exact = _mixer(config, now, folder)
    upcoming = tasks.upcoming(mixer.num_tasks)
    horizon = horizon.assuming(now.success)
    with _trial_draw(store, config, now, sampler) as trial:
        try:
            available = trial.available()
            plans = forecast(mixer, config.replay, available, tasks, first=now.iteration, horizon=horizon)
            plan = next(plans)
        except ReplayError as error:
            raise wrong(str(error)) from error
        times = max(_FEWEST_DRAWS, min(_MOST_DRAWS, _MOST_ROWS // max(1, plan.replay)))
        draws = trial.draws(plan.picks, times) if plan.replay else []
        exact = goes_on and is_exact and _is_certain(mixer, config)
        return {
            "run": record.id,
            "iteration": now.iteration,
            "policy_version": now.policy_version,
            "settings": shown(config.replay),
            "yaml": as_yaml(config.replay),
            "plan": {
                **_plan(plan, mixer, available),
                "assumed_tasks": len(upcoming),
                "new_tasks": sum(task not in tasks.tried for task in upcoming),
                "remainders": is_exact,
            },
            "funnel": _funnel(trial, available, gone, mixer, upcoming),
            "empty_sources": trial.empty_sources(mixer.rule.unit, mixer.rule.group_size, config.replay.attach),
            "batch": _batch(trial, draws, now, exact=exact),
            "spreads": spreads(trial.index, [[row.position for row in rows] for rows in draws], now),
            **batches(chain([plan], plans), config, first=now.iteration, horizon=horizon),
        }


def empty_sources(
    store: ReplayStore, run: str, *, sampler: Sampler | None = None, named: Iterable[str] = ()
) -> list[str]:
    """A sentence for each source that can give the run nothing as it is configured; `named` are looked at besides.

    A `sampler` of a person's own is asked only where it is given.
    """
    config = stored_config(store.run(run))
    if sampler is None:
        sampler = _built_in(config) if config.replay.sampler in SAMPLERS else make_sampler("uniform", 0)
    with store.reading() as connection:
        now = run_state(connection, run)
    with _trial_draw(store, config, now, sampler) as trial:
        return trial.empty_sources(config.replay.unit, config.batch.group_size, [*config.replay.attach, *named])


def rows_to_read(store: ReplayStore, run: str) -> int:
    """About how many rows a `preview` of the run has to read into memory; 0 while they are there."""
    if store.has_read(run):
        return 0
    with store.reading() as connection:
        mine = (_rows.run == run) | sa.text(IMPORTED)
        return connection.scalar(sa.select(sa.func.count()).where(_rows.state == ELIGIBLE, mine)) or 0


# Named one by one, for an index to find them: rows that are not eligible are few.
_GONE = sa.select(sa.func.count()).where(_rows.state.in_([state for state in STATES if state != ELIGIBLE]))


def _built_in(config: StoredConfig) -> Sampler:
    name = config.replay.sampler
    if name not in SAMPLERS:
        raise wrong(
            f"replay.sampler must be a built-in one to be tried out without running its file, got {name}. Choose one "
            f"of {', '.join(SAMPLERS)}, or ask: agentloop replay mix"
        )
    return make_sampler(name, config.run.seed, config.replay.sampler_options)


def _mixer(config: StoredConfig, now: RunState, folder: Path | None) -> tuple[Mixer, bool]:
    """The run's own between two iterations, and whether it knows what was rounded off."""
    rule = config.mix_rule()
    if now.iteration > config.run.iterations:  # it is over, and its schedule may have ended at none
        rule = rule.model_copy(update={"schedule": Schedule()})
    saved = saved_mixer(folder, now.iteration - 1, unit=rule.unit)
    return now.mixer(rule, saved), saved is not None


@contextmanager
def _trial_draw(store: ReplayStore, config: StoredConfig, now: RunState, sampler: Sampler) -> Iterator[TrialDraw]:
    request = DrawRequest(now.run, now.iteration, now.policy_version, limits=config.replay.limits)
    with ExitStack() as stack:
        try:
            trial = stack.enter_context(store.trial_draw(request, sampler, sources=list(config.replay.sources)))
        except ValueError as error:
            # Options can be so large or so small that no weight is left that is a number.
            given = json.dumps(config.replay.sampler_options)
            raise wrong(f"replay.sampler_options must suit these rows, got {given}: {error}") from error
        yield trial


def _is_certain(mixer: Mixer, config: StoredConfig) -> bool:
    """Whether what is drawn does not hang on the tasks to come, which are guessed, or on how they will be solved."""
    replay = config.replay
    return not mixer.num_tasks and not replay.complete_zero_variance and replay.retire_solved is None


def _plan(plan: BatchPlan, mixer: Mixer, available: Availability) -> QueryResult:
    return {
        **numbers(plan),
        "trajectories": mixer.rule.trajectories,
        "observes": mixer.rule.mode == "observe",
        "factor": mixer.factor,
        "started": mixer.started,
        "picks": [asdict(pick) for pick in plan.picks],
        "unknown_priority": available.unknown_priority,
        "incomparable": dict(available.incomparable),
    }


def _funnel(
    trial: TrialDraw, available: Availability, gone: int, mixer: Mixer, upcoming: Sequence[str]
) -> list[QueryResult]:
    """How many rows are left after each rule, from all that the run stored and others that it may draw.

    `gone`: rows of the run that are not eligible.
    """
    steps = [(left.rule, left.rows) for left in trial.left()]
    steps.insert(0, ("stored", steps[0][1] + gone))
    drawable = steps[-1][1]
    if available.rows < drawable:
        steps.append(("caps", available.rows))
    if mixer.rule.unit == "group":
        size = mixer.rule.group_size
        steps.append(("groups", size * available.groups.get(size, 0)))
    elif upcoming:
        steps.append(("tasks", sum(available.by_task.get(task, 0) for task in set(upcoming))))
    before = [steps[0][1], *(rows for _, rows in steps)]
    return [{"rule": rule, "left": rows, "out": last - rows} for (rule, rows), last in zip(steps, before, strict=False)]


def _batch(trial: TrialDraw, draws: Sequence[Sequence[SelectedRow]], now: RunState, *, exact: bool) -> QueryResult:
    """The first of the example draws, row by row, and of how many tasks they are on average.

    `exact`: the run goes on from just this moment, so that these are the rows it would draw.
    """
    index = trial.index
    columns, codes = index.columns, index.codes

    def described(row: SelectedRow) -> QueryResult:
        at = row.position
        own = bool(columns["own"][at])
        names = {name: codes[name].names[int(columns[name][at])] for name in ("run", "source", "task", "group")}
        return {
            "id": index.ids[at],
            **names,
            "iteration": int(columns["iteration"][at]),
            "staleness": now.policy_version - int(columns["policy_version"][at]) if own else None,
            "reward": float(columns["reward"][at]),
            "success": bool(columns["success"][at]),
            "advantage": float(columns["advantage"][at]),
            "probability": row.probability,
            "replayed": int(columns["uses"][at]),
        }

    tasks = [len({int(columns["task"][row.position]) for row in rows}) for rows in draws]
    return {
        "exact": exact,
        "draws": len(draws),
        "rows": [described(row) for row in (draws[0] if draws else ())],
        "tasks_mean": float(np.mean(tasks)) if tasks else None,
    }
