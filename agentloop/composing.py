"""One iteration's batch: planned, then filled with what was collected and drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentloop.algorithms.advantages import grpo_advantages
from agentloop.batch import BatchRow
from agentloop.collect import Collected
from agentloop.config import RunConfig
from replay.completion import with_completions
from replay.mixing import BatchPlan, Mixer
from replay.records import FRESH, DrawRecord, GroupRecord, Trajectory
from replay.request import Availability, DrawRequest, Pick
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

    def rows(self) -> tuple[list[BatchRow], list[BatchRow]]:
        """The fresh ones, and the replayed ones with the advantage of the group they were born in."""
        fresh = [BatchRow(t, "fresh", self.completed.get(t.id, t.record.advantage)) for t in self.fresh.trajectories]
        replayed = [
            BatchRow(d.trajectory, "replay", d.trajectory.record.advantage, d.draw.staleness, d.weight)
            for d in self.drawn
        ]
        return fresh, replayed

    def without_member(self, task_hash: Callable[[int], str]) -> list[int]:
        """Tasks of the plan that nothing in the batch is of: an engine failed, or a stored row was corrupt."""
        if len(self.fresh.groups) == self.planned.plan.num_tasks:
            return []
        there = {group.task for group in self.fresh.groups} | {d.trajectory.record.task for d in self.drawn}
        return [index for index in self.planned.tasks if task_hash(index) not in there]

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


def flat_groups(fresh: Collected) -> list[tuple[GroupRecord, list[Trajectory]]]:
    """Groups whose members have one reward, and so no advantage over each other."""
    members: dict[str, list[Trajectory]] = {}
    for row in fresh.trajectories:
        members.setdefault(row.record.group, []).append(row)
    return [
        (group, members[group.id])
        for group in fresh.groups
        if len({row.record.reward for row in members[group.id]}) == 1
        and not any(row.record.advantage for row in members[group.id])
    ]


def completed_advantages(fresh: Collected, drawn: Sequence[Drawn], *, normalise_std: bool) -> dict[str, float]:
    """Advantages of fresh members of equal reward, over their group and the drawn rows of its task that differ.

    Only theirs: a drawn row keeps the advantage it is stored with, like every replayed row.
    """
    rewards = Counter[tuple[str, float]]((d.trajectory.record.task, d.trajectory.record.reward) for d in drawn)
    advantages: dict[str, float] = {}
    for group, members in flat_groups(fresh):
        own = members[0].record.reward
        others = [
            got for (task, got), count in rewards.items() if task == group.task and got != own for _ in range(count)
        ]
        if others:
            over_all = grpo_advantages([own] * len(members) + others, normalise_std=normalise_std)
            advantages |= dict.fromkeys((row.id for row in members), over_all[0])
    return advantages


def _is_from(row: Trajectory, source: str) -> bool:
    return source in (row.record.source, row.record.run)
