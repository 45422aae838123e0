"""One iteration's batch: planned, then filled with what was collected and drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agentloop.algorithms.advantages import ReplayBaseline
from agentloop.config import RunConfig
from agentloop.records import BatchRow
from agentloop.rollouts.advantage_estimator import BatchAdvantages, Valued, member_of
from agentloop.rollouts.collect import Collected
from agentloop.rollouts.dynamic_sampling import flat_groups
from agentloop.rollouts.turn_rewards import Valuation
from replay.mixing.mixer import BatchPlan, Mixer, with_completions
from replay.mixing.request import Availability, DrawRequest, Pick
from replay.records import FRESH, REPLAY, DrawRecord, Trajectory
from replay.store import Drawn


@dataclass(frozen=True)
class Planned:
    """A batch before anything is collected."""

    plan: BatchPlan
    tasks: tuple[int, ...]
    """Index of the training task of each slot."""
    available: Availability
    request: DrawRequest

    def picks(self, fresh: Collected, config: RunConfig) -> tuple[Pick, ...]:
        """What to draw, now that the fresh groups are known."""
        if not config.replay.complete_zero_variance:
            return self.plan.picks
        flat = [(group.task, members[0].record.reward) for group, members in flat_groups(fresh)]
        return with_completions(self.plan.picks, flat, self.available.by_task_reward)


@dataclass(frozen=True)
class Composition:
    """What went into one iteration's batch."""

    planned: Planned
    fresh: Collected
    fresh_draws: list[DrawRecord]
    drawn: list[Drawn]
    completed: Mapping[str, float]
    """Advantages of the fresh members of groups that a drawn row completes, by id."""
    advantages: BatchAdvantages
    """Fresh rows first."""

    def rows(self) -> tuple[list[BatchRow], list[BatchRow]]:
        """The fresh ones and the replayed ones, with the advantages they are trained with."""
        rows = self.advantages.rows
        return [row for row in rows if row.stream == FRESH], [row for row in rows if row.stream == REPLAY]

    @property
    def tasks(self) -> tuple[int, ...]:
        """Indices of the training tasks it was made of, planned and taken besides."""
        return (*self.planned.tasks, *self.fresh.further_tasks)

    def without_member(self, task_hash: Callable[[int], str]) -> list[int]:
        """Tasks of the plan that nothing in the batch is of: an engine failed, or a stored row was corrupt."""
        groups = [*self.fresh.groups, *self.fresh.spare_groups]
        if len(groups) == len(self.tasks):
            return []
        there = {group.task for group in groups} | {d.trajectory.record.task for d in self.drawn}
        return [index for index in self.tasks if task_hash(index) not in there]

    def metrics(self, config: RunConfig, mixer: Mixer) -> dict[str, float]:
        """Configured, ruled and achieved composition, and what the buffer could not give."""
        plan, fresh, replayed = self.planned.plan, len(self.fresh.trajectories), len(self.drawn)
        batch = fresh if config.replay.mode == "observe" else fresh + replayed
        metrics = {
            "batch/planned_fresh": plan.planned_fresh,
            "batch/planned_replay": plan.planned_replay,
            "batch/fresh": fresh,
            "batch/replay": replayed,
            "batch/fraction": plan.fraction,
            "batch/ruled_fraction": plan.planned_replay / config.batch.trajectories,
            "batch/achieved_fraction": replayed / batch,
            "batch/fresh_shortfall": plan.fresh - fresh,
            "replay/starved_rows": plan.planned_replay - replayed,
            "replay/starved_groups": plan.starved_groups,
            "replay/starved_iterations": mixer.starved_iterations,
            "replay/started": mixer.started,
            "replay/unknown_priority": self.planned.available.unknown_priority,
            "replay/incomparable": sum(self.planned.available.incomparable.values()),
        }
        if mixer.rule.controller is not None:
            metrics["replay/controller_factor"] = mixer.factor
        if config.replay.complete_zero_variance:
            metrics["batch/completed"] = len(self.completed)
        for source, count in plan.planned_sources.items():
            metrics[f"batch/planned_source/{source}"] = count
            metrics[f"batch/source/{source}"] = sum(_is_from(d.trajectory, source) for d in self.drawn)
        stale = [d.draw.staleness for d in self.drawn if d.draw.staleness is not None]
        metrics |= self.advantages.metrics
        if stale:
            metrics |= {"replay/staleness_mean": sum(stale) / len(stale), "replay/staleness_max": max(stale)}
        return {name: float(value) for name, value in metrics.items()}


def fresh_records(run: str, iteration: int, policy_version: int, rows: Sequence[Trajectory]) -> list[DrawRecord]:
    """The iteration's own rows take its first slots."""
    return [
        DrawRecord(
            run=run,
            iteration=iteration,
            slot=slot,
            trajectory=row.id,
            stream=FRESH,
            probability=None,
            staleness=policy_version - row.record.policy_version_min,
        )
        for slot, row in enumerate(rows)
    ]


def batch_advantages(
    fresh: Collected,
    drawn: Sequence[Drawn],
    completed: Mapping[str, float],
    *,
    valuation: Valuation,
    baseline: ReplayBaseline,
) -> BatchAdvantages:
    """The iteration's rows with their advantages, fresh ones first.

    Fresh rows come with those of their group, or of the group as it was completed; replayed ones with the one they are
    stored with. Any other `baseline` than `stored` measures them anew, by rewards less today's penalty.
    """
    rows = [
        Valued(BatchRow(t, "fresh", completed.get(t.id, t.record.advantage)), fresh.worth[t.id])
        for t in fresh.trajectories
    ]
    trajectories = [d.trajectory for d in drawn]
    asked = baseline != "stored"
    worth = valuation.worth(trajectories) if asked else [t.record.reward for t in trajectories]
    rows += [
        Valued(BatchRow(d.trajectory, "replay", d.trajectory.record.advantage, d.draw.staleness, d.weight), value)
        for d, value in zip(drawn, worth, strict=True)
    ]
    return valuation.estimator.in_batch(rows, baseline)


def completed_advantages(fresh: Collected, drawn: Sequence[Drawn], valuation: Valuation) -> dict[str, float]:
    """Advantages of fresh members of equal reward, over their group and the drawn rows of its task that differ.

    Only theirs: a drawn row keeps the advantage it is stored with, like every replayed row.
    """
    advantages: dict[str, float] = {}
    for group, members in flat_groups(fresh):
        own = members[0].record.reward
        others = [
            d.trajectory for d in drawn if d.trajectory.record.task == group.task and d.trajectory.record.reward != own
        ]
        if others:
            together = [member_of(row, fresh.worth[row.id]) for row in members]
            for row, value in zip(others, valuation.worth(others), strict=True):
                together.append(replace(member_of(row, value), replayed=True))
            over_all = valuation.estimator.of_one_task(together)[: len(members)]
            advantages |= {row.id: advantage for row, advantage in zip(members, over_all, strict=True)}
    return advantages


def _is_from(row: Trajectory, source: str) -> bool:
    return source in (row.record.source, row.record.run)
