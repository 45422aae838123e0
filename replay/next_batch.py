"""Previews a run's next batch, which is planned and drawn as in the run.

The preview changes neither the run, nor its database, nor its sampler.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
import yaml
from pydantic import ValidationError

from replay.config import ReplayConfig, StoredConfig, WrongSettings, stored_config
from replay.errors import ReplayError, sentence_for_validation_error
from replay.mixing.batch_plan import BatchPlan, Mixer
from replay.mixing.mix_settings import MixRule
from replay.mixing.request import Availability, DrawRequest
from replay.questions.filters.query import QueryResult
from replay.questions.runs import FINISHED, progress
from replay.records import ELIGIBLE, STATES
from replay.sampling.samplers import SAMPLERS, Sampler, make_sampler
from replay.sampling.selection import SelectedRow
from replay.sampling.trial import TrialDraw
from replay.storage.format.schema import groups, iterations, metrics, policies, sampler_state, trajectories
from replay.store import ReplayStore

_SUCCESS = "rollout/success"
_rows = trajectories.c


@dataclass(frozen=True)
class _RunState:
    """The state of a run between two iterations."""

    run: str
    iteration: int
    """The next iteration."""
    policy_version: int
    """Version of the policy that the next iteration updates."""
    sampler: Mapping[str, Any] | None
    has_replayed: bool
    best_success: float | None


def _run_state(connection: sa.Connection, run: str) -> _RunState:
    newest = connection.scalar(sa.select(sa.func.max(iterations.c.iteration)).where(iterations.c.run == run)) or 0
    version = connection.scalar(sa.select(sa.func.max(policies.c.version)).where(policies.c.run == run))
    if version is None:  # a trainer of one's own may publish no policy
        updated = sa.select(sa.func.max(iterations.c.policy_version) + 1).where(iterations.c.run == run)
        version = connection.scalar(updated) or 0
    after = (sampler_state.c.run == run) & (sampler_state.c.iteration == newest)
    state = connection.scalar(sa.select(sampler_state.c.state).where(after))
    replayed = sa.exists().where(iterations.c.run == run, iterations.c.planned_replay > 0)
    best = sa.select(sa.func.max(metrics.c.value)).where(metrics.c.run == run, metrics.c.name == _SUCCESS)
    return _RunState(
        run=run,
        iteration=newest + 1,
        policy_version=version,
        sampler=None if state is None else json.loads(state),
        has_replayed=bool(connection.scalar(sa.select(replayed))),
        best_success=connection.scalar(best),
    )


def preview(
    store: ReplayStore,
    run: str | None = None,
    config: StoredConfig | None = None,
    *,
    folder: Path | None = None,
    sampler: Sampler | None = None,
) -> QueryResult:
    """Preview the next batch of `run` (None: the only run). `config` replaces the run's own configuration.

    `folder` is the run's folder: its checkpoint holds the remainders of earlier iterations. `sampler` is a sampler of a
    person's own, because its file is not run here. Raises WrongSettings if the settings allow no batch.
    """
    record = store.run(run)
    config = config or stored_config(record)
    with store.reading() as connection:
        now = _run_state(connection, record.id)
        gone = connection.scalar(_GONE.where(_rows.run == record.id)) or 0
        # The task tried longest ago comes first.
        longest_ago = (sa.func.max(groups.c.iteration), groups.c.task)
        query = sa.select(groups.c.task).where(groups.c.run == record.id).group_by(groups.c.task)
        tried = list(connection.scalars(query.order_by(*longest_ago)))
    sampler = sampler or _built_in(config)
    goes_on = now.sampler is not None and now.sampler.get("name") == sampler.title
    if now.sampler is not None and goes_on:
        sampler.load_state(now.sampler)
    mixer, is_exact = _mixer(config, now, folder)
    upcoming = _expected_tasks(config, tried, mixer.num_tasks)
    with _trial_draw(store, config, now, sampler) as trial:
        try:
            available = trial.available()
        except ReplayError as error:
            raise WrongSettings(str(error)) from error
        plan = mixer.plan(iteration=now.iteration, available=available, tasks=upcoming)
        rows = trial.draw(plan.picks) if plan.replay else []
        new = sum(task not in tried for task in upcoming)
        return {
            "run": record.id,
            "iteration": now.iteration,
            "ended": progress(store, record, folder)["state"] == FINISHED,
            "policy_version": now.policy_version,
            "settings": config.replay.model_dump(mode="json"),
            "yaml": as_yaml(config.replay),
            "plan": {**_plan(plan, mixer, available), "assumed_tasks": len(upcoming), "new_tasks": new},
            "rules": _rules(trial, available, gone, mixer, upcoming),
            "sources": _sources(config.replay, trial, available, rows),
            "schedule": _schedule(mixer.rule, now.iteration),
            "empty_sources": trial.empty_sources(mixer.rule.unit, mixer.rule.group_size, config.replay.attach),
            "batch": {"exact": goes_on and is_exact and not mixer.num_tasks, "rows": _described(trial, rows, now)},
        }


def _expected_tasks(config: StoredConfig, tried: Sequence[str], count: int) -> list[str]:
    """The tasks that the preview assumes to come next: tasks never tried, then tasks tried longest ago, repeatedly.

    The run may take the tasks of one pass in another order.
    """
    pool = config.task_pool
    if pool == "unlimited" and not (config.has_rows and tried):
        return [f"new {place}" for place in range(count)]  # every task is new
    new = 0 if pool == "unlimited" else max(0, pool - len(tried))
    whole = new + len(tried)
    return [f"new {place}" if place < new else tried[place - new] for place in (at % whole for at in range(count))]


def empty_sources(
    store: ReplayStore, run: str, *, sampler: Sampler | None = None, named: Iterable[str] = ()
) -> list[str]:
    """Write a sentence for each source from which the run's configuration can draw no row.

    `named` are further sources to look at. A person's own sampler counts only if it is given as `sampler`.
    """
    config = stored_config(store.run(run))
    if sampler is None:
        sampler = _built_in(config) if config.replay.sampler in SAMPLERS else make_sampler("uniform", 0)
    with store.reading() as connection:
        now = _run_state(connection, run)
    with _trial_draw(store, config, now, sampler) as trial:
        return trial.empty_sources(config.replay.unit, config.batch.group_size, [*config.replay.attach, *named])


def preview_with(store: ReplayStore, run: str | None = None, **given: Any) -> QueryResult:
    """Preview the next batch by the run's own `replay` settings, with the `given` settings changed."""
    return preview(store, run, changed(stored_config(store.run(run)), given))


# Each state is named, so that an index finds the few rows that are not eligible.
_GONE = sa.select(sa.func.count()).where(_rows.state.in_([state for state in STATES if state != ELIGIBLE]))


def _built_in(config: StoredConfig) -> Sampler:
    name = config.replay.sampler
    if name not in SAMPLERS:
        raise WrongSettings(
            f"replay.sampler must be a built-in one to be tried out without running its file, got {name}. Choose one "
            f"of {', '.join(SAMPLERS)}, or run: agentloop replay mix"
        )
    return make_sampler(name, config.run.seed, config.replay.sampler_options)


def _mixer(config: StoredConfig, now: _RunState, folder: Path | None) -> tuple[Mixer, bool]:
    """The run's mixer, and whether a checkpoint says what earlier iterations rounded off."""
    mixer = Mixer(config.mix_rule())
    try:
        state = folder and folder / "checkpoints" / f"{now.iteration - 1:06d}" / "state.json"
        saved = state and json.loads(state.read_text())["mixer"]
    except (OSError, ValueError, KeyError, TypeError):
        saved = None  # a running trainer writes and removes checkpoints
    if isinstance(saved, dict) and saved.get("unit") == mixer.rule.unit:
        mixer.load_state(saved)
        return mixer, True
    mixer.started = now.has_replayed
    mixer.success_reached = (now.best_success or 0.0) >= (mixer.rule.start.success_rate or 0.0)
    return mixer, False


@contextmanager
def _trial_draw(store: ReplayStore, config: StoredConfig, now: _RunState, sampler: Sampler) -> Iterator[TrialDraw]:
    limits = config.replay.limits.model_copy(update={"max_tokens": config.context.max_tokens})
    request = DrawRequest(now.run, now.iteration, now.policy_version, limits=limits)
    with ExitStack() as stack:
        try:
            trial = stack.enter_context(store.trial_draw(request, sampler))
        except ValueError as error:  # extreme options can leave no finite weight
            given = json.dumps(config.replay.sampler_options)
            raise WrongSettings(f"replay.sampler_options must suit these rows, got {given}: {error}") from error
        yield trial


def _plan(plan: BatchPlan, mixer: Mixer, available: Availability) -> QueryResult:
    names = ("fraction", "planned_fresh", "planned_replay", "fresh", "replay", "shortfall")
    return {
        **{name: getattr(plan, name) for name in names},
        "groups": sorted(map(list, Counter(size for _, size in plan.groups).items()), reverse=True),
        "observes": mixer.rule.mode == "observe",
        "started": mixer.started,
        "picks": [asdict(pick) for pick in plan.picks],
        "unknown_priority": available.unknown_priority,
    }


def _rules(
    trial: TrialDraw, available: Availability, gone: int, mixer: Mixer, upcoming: Sequence[str]
) -> list[QueryResult]:
    """Count the stored rows that are left after each rule. `gone` counts rows of the run that are not eligible."""
    steps = trial.count_left_by_rule()
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


def _sources(
    replay: ReplayConfig, trial: TrialDraw, available: Availability, rows: Sequence[SelectedRow]
) -> list[QueryResult]:
    """A record for each source that has rows or is named by the settings: its share, its drawable rows, rows drawn.

    A share of None leaves the choice to the sampler.
    """
    names, codes = trial.index.codes["source"].names, trial.index.columns["source"]
    drawn = Counter(names[codes[row.position]] for row in rows)
    there = {names[code] for code in np.unique(codes).tolist()}
    return [
        {"source": name, "share": replay.sources.get(name), "drawable": available.by_source.get(name, 0)}
        | {"drawn": drawn[name], "attached": replay.attach.get(name)}
        for name in sorted({*there, *replay.sources, *replay.attach})
    ]


def _schedule(rule: MixRule, iteration: int) -> list[QueryResult]:
    """The configured fraction at up to 48 places of the run, and at this iteration."""
    last = max(rule.iterations, iteration)
    places = sorted({1, iteration, last, *range(1, last + 1, max(1, last // 46))})
    return [{"iteration": place, "fraction": rule.fraction_at(place)} for place in places]


def _described(trial: TrialDraw, rows: Sequence[SelectedRow], now: _RunState) -> list[QueryResult]:
    index, found = trial.index, []
    for row in rows:
        facts: dict[str, Any] = {name: column[row.position].item() for name, column in index.columns.items()}
        found.append(
            {
                "id": index.ids[row.position],
                **{name: index.codes[name].names[facts[name]] for name in ("run", "source", "task", "group")},
                **{name: facts[name] for name in ("iteration", "reward", "success", "advantage")},
                "staleness": now.policy_version - facts["policy_version"] if facts["own"] else None,
                "probability": row.probability,
                "replayed": facts["uses"],
            }
        )
    return found


def changed(stored: StoredConfig, given: Mapping[str, Any]) -> StoredConfig:
    """The configuration `stored` with the `given` values of `replay`. Raises WrongSettings."""
    try:
        return StoredConfig.model_validate({**dict(stored), "replay": {**dict(stored.replay), **given}})
    except ValidationError as error:
        raise WrongSettings(sentence_for_validation_error(error)) from error


def as_yaml(replay: ReplayConfig) -> str:
    """The section `replay` of a configuration, without the keys that have their defaults."""
    values = replay.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump({"replay": values}, sort_keys=False)
