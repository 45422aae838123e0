"""Where a run stands before its next iteration, as far as its database and its checkpoints tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from replay.mixing.mix_settings import MixRule
from replay.mixing.mixer import Mixer
from replay.sampling.samplers import Sampler
from replay.storage.format.schema import groups, iterations, metrics, policies, sampler_state

_ESS_BY_AGE = "actor/replay/ess/age_"
_SUCCESS = "rollout/success"
_FACTOR = "replay/controller_factor"


@dataclass(frozen=True)
class RunState:
    """Between two iterations of a run."""

    run: str
    iteration: int
    """The next one."""
    policy_version: int
    """The policy that is about to learn."""
    metrics: Mapping[str, float]
    """The newest iteration's."""
    sampler: Mapping[str, Any] | None
    """State after the newest iteration."""
    has_replayed: bool
    best_success: float | None
    """The highest of any iteration's fresh episodes."""

    @property
    def success(self) -> float | None:
        """Share of the newest iteration's fresh episodes that succeeded."""
        return self.metrics.get(_SUCCESS)

    def mixer(self, rule: MixRule, saved: Mapping[str, Any] | None) -> Mixer:
        """As the run's own would stand, from its checkpoint, or without what earlier iterations rounded off."""
        mixer = Mixer(rule)
        if saved is not None:
            mixer.load_state(saved)
            return mixer
        mixer.started = self.has_replayed
        mixer.success_reached = (self.best_success or 0.0) >= (rule.start.success_rate or 0.0)
        if rule.controller == "ess":
            ess = {name: value for name, value in self.metrics.items() if name.startswith(_ESS_BY_AGE)}
            mixer.factor = rule.ess.next_factor(self.metrics.get(_FACTOR, 1.0), ess)
        return mixer

    def go_on(self, sampler: Sampler) -> bool:
        """The run's own random state for a sampler of the same name; whether there was one."""
        if self.sampler is None or self.sampler.get("name") != sampler.title:
            return False
        sampler.load_state(self.sampler)
        return True


def run_state(connection: sa.Connection, run: str) -> RunState:
    newest = connection.scalar(sa.select(sa.func.max(iterations.c.iteration)).where(iterations.c.run == run)) or 0
    version = connection.scalar(sa.select(sa.func.max(policies.c.version)).where(policies.c.run == run)) or 0
    of_newest = (metrics.c.run == run) & (metrics.c.iteration == newest)
    found = connection.execute(sa.select(metrics.c.name, metrics.c.value).where(of_newest)).all()
    state = connection.scalar(
        sa.select(sampler_state.c.state).where(sampler_state.c.run == run, sampler_state.c.iteration == newest)
    )
    replayed = sa.exists().where(iterations.c.run == run, iterations.c.planned_replay > 0)
    best = sa.select(sa.func.max(metrics.c.value)).where(metrics.c.run == run, metrics.c.name == _SUCCESS)
    return RunState(
        run=run,
        iteration=newest + 1,
        policy_version=version,
        metrics={name: value for name, value in found if value is not None},
        sampler=None if state is None else json.loads(state),
        has_replayed=bool(connection.scalar(sa.select(replayed))),
        best_success=connection.scalar(best),
    )


def saved_mixer(folder: Path | None, iteration: int, *, unit: str) -> Mapping[str, Any] | None:
    """The mixer of that unit in a run folder's checkpoint after `iteration`; None: there is no such checkpoint, or none
    whole, or what it rounded off was of another unit."""
    if folder is None:
        return None
    try:
        values = json.loads((folder / "checkpoints" / f"{iteration:06d}" / "state.json").read_text())
        mixer = values["mixer"]
    except (OSError, ValueError, KeyError, TypeError):
        # A running trainer writes and removes checkpoints; without one the batch is planned without its remainders.
        return None
    return mixer if isinstance(mixer, dict) and mixer.get("unit") == unit else None


def tried_tasks(connection: sa.Connection, run: str) -> list[str]:
    """Hashes of the tasks that the run has tried, the one tried longest ago first."""
    newest = sa.func.max(groups.c.iteration)
    query = sa.select(groups.c.task).where(groups.c.run == run).group_by(groups.c.task).order_by(newest, groups.c.task)
    return [str(task) for task in connection.scalars(query)]
