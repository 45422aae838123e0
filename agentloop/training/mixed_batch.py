"""One iteration's batch: planned, then mixed from what was collected and what was drawn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentloop.config import RunConfig
from agentloop.learning.batch import member_of
from agentloop.records import Penalty, kl_penalties, penalised_rewards
from agentloop.rollouts.dynamic_sampling import zero_variance_groups
from agentloop.rollouts.episodes.restart import Restart
from agentloop.rollouts.trajectories import Collected
from agentloop.training.advantage_estimator import AdvantageEstimator
from context.authors import LLM_DO_NOT_TRAIN, AuthorTable
from replay.mixing.batch_plan import BatchPlan, Mixer, add_completing_picks
from replay.mixing.request import Availability, DrawRequest, Pick
from replay.records import FRESH, REPLAY, RESTART, BatchRow, Trajectory


@dataclass(frozen=True)
class IterationPlan:
    """A batch before anything is collected."""

    plan: BatchPlan
    tasks: tuple[int, ...]
    """Index of the training task of each slot, but for the last ones where there are `restarts`."""
    available: Availability
    request: DrawRequest
    restarts: tuple[Restart, ...] = ()
    """Where the last groups of the plan begin, which have no slot of `tasks`."""
    missing_restarts: int = 0
    """Groups more that were to begin inside a stored success, for which there was none."""

    def picks(self, fresh: Collected, config: RunConfig) -> tuple[Pick, ...]:
        """What to draw, now that the fresh groups are known."""
        if not config.replay.complete_zero_variance:
            return self.plan.picks
        same = [(group.task, members[0].record.reward) for group, members in zero_variance_groups(fresh)]
        return add_completing_picks(self.plan.picks, same, self.available.by_task_reward)


@dataclass(frozen=True)
class MixedBatch:
    """What went into one iteration's batch."""

    planned: IterationPlan
    fresh: Collected
    rows: list[BatchRow]
    """Fresh ones first, with the advantages they are trained with."""
    completed: int
    """Fresh members of zero-variance groups that a drawn row completes."""
    advantage_metrics: Mapping[str, float]

    @property
    def replayed_rows(self) -> list[BatchRow]:
        return [row for row in self.rows if row.stream == REPLAY]

    @property
    def tasks(self) -> tuple[int, ...]:
        """Indices of the training tasks it was made of, planned and taken besides."""
        return (*self.planned.tasks, *self.fresh.further_tasks)

    @property
    def num_tokens(self) -> int:
        return sum(row.trajectory.record.num_tokens for row in self.rows)

    def without_member(self, task_hash: Callable[[int], str]) -> list[int]:
        """Tasks of the plan that nothing in the batch is of: an engine failed, or a stored row was corrupt."""
        collected = [*self.fresh.trajectories, *self.fresh.unused]
        restarted = {row.record.group for row in collected if row.record.source == RESTART}
        groups = [one for one in (*self.fresh.groups, *self.fresh.unused_groups) if one.id not in restarted]
        if len(groups) == len(self.tasks):
            return []
        there = {group.task for group in groups} | {row.trajectory.record.task for row in self.replayed_rows}
        return [index for index in self.tasks if task_hash(index) not in there]

    def metrics(self, config: RunConfig, mixer: Mixer) -> dict[str, float]:
        """Configured, ruled and achieved composition, and what the buffer could not give."""
        plan, drawn = self.planned.plan, self.replayed_rows
        fresh, replayed = len(self.fresh.trajectories), len(drawn)
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
        if mixer.rule.controller == "ess":
            metrics["replay/controller_factor"] = mixer.factor
        if config.replay.complete_zero_variance:
            metrics["batch/completed"] = self.completed
        if config.replay.restarts.enable:
            metrics["restarts/missing_groups"] = self.planned.missing_restarts
        for source, count in plan.planned_sources.items():
            found = sum(source in (row.trajectory.record.source, row.trajectory.record.run) for row in drawn)
            metrics |= {f"batch/planned_source/{source}": count, f"batch/source/{source}": found}
        stale = [row.staleness for row in drawn if row.staleness is not None]
        if stale:
            metrics |= {"replay/staleness_mean": sum(stale) / len(stale), "replay/staleness_max": max(stale)}
        return {name: float(value) for name, value in {**metrics, **self.advantage_metrics}.items()}


def mix_batch(
    planned: IterationPlan,
    fresh: Collected,
    rows: Sequence[BatchRow],
    config: RunConfig,
    *,
    estimator: AdvantageEstimator,
    penalty: Penalty | None,
) -> MixedBatch:
    """The batch of `rows`, fresh ones first, with the advantages they are trained with.

    Rows keep theirs, but for fresh groups that a drawn row completes; any other `replay.baseline` than `stored`
    measures all of them once more, by rewards less today's penalty.
    """
    replay = config.replay
    baseline = replay.baseline if replay.mode == "train" else "stored"
    completed: dict[str, float] = {}
    if replay.complete_zero_variance and baseline == "stored":
        completed = completed_advantages(fresh, rows, estimator=estimator, penalty=penalty)
    elif baseline != "stored":
        stored = [row.trajectory for row in rows if row.stream == REPLAY]  # fresh ones are charged already
        rewards = iter(penalised_rewards(stored, kl_penalties(penalty, stored)))
        rows = [replace(row, reward=next(rewards)) if row.stream == REPLAY else row for row in rows]
    rows = [replace(row, advantage=completed.get(row.trajectory.id, row.advantage)) for row in rows]
    rows, metrics = estimator.advantages_for_batch(rows, baseline)
    return MixedBatch(planned, fresh, rows, len(completed), metrics)


def completed_advantages(
    fresh: Collected, rows: Sequence[BatchRow], *, estimator: AdvantageEstimator, penalty: Penalty | None
) -> dict[str, float]:
    """Advantages of fresh members of equal reward, over their group and the drawn rows of its task that differ."""
    drawn = [row.trajectory for row in rows if row.stream == REPLAY]
    advantages: dict[str, float] = {}
    for group, members in zero_variance_groups(fresh):
        own = members[0].record.reward
        others = [row for row in drawn if row.record.task == group.task and row.record.reward != own]
        if others:
            together = [member_of(row, fresh.rewards[row.id]) for row in members]
            charged = penalised_rewards(others, kl_penalties(penalty, others))
            for row, reward in zip(others, charged, strict=True):
                together.append(replace(member_of(row, reward), replayed=True))
            over_all = estimator.advantages_for_task(together)[: len(members)]
            advantages |= {row.id: advantage for row, advantage in zip(members, over_all, strict=True)}
    return advantages


def learned_rows(rows: Sequence[BatchRow], *, observes: bool, scored_by: int | None) -> list[BatchRow]:
    """What the trainer is given of a batch, in the order of its slots: no replayed row where those are only observed.

    `scored_by`: the policy's version, where the log-probs it samples with are those it is scored with.
    """

    def is_scored(row: BatchRow) -> bool:
        """Whether this policy sampled all of it, in sight of what it is trained on."""
        record, plain = row.trajectory.record, (s.behavior_context == "plain" for s in row.trajectory.segments)
        sampled_now = record.policy_version_min == record.policy_version_max == scored_by
        return scored_by is not None and row.stream == FRESH and sampled_now and all(plain)

    return [replace(row, scored=is_scored(row)) for row in rows if row.stream == FRESH or not observes]


def as_observed(trajectory: Trajectory, authors: AuthorTable) -> Trajectory:
    """A trajectory with every trained token written by `llm(do_not_train)`: sampled, scored, without loss."""
    code = np.uint8(authors.code(LLM_DO_NOT_TRAIN))
    segments = []
    for segment in trajectory.segments:
        tokens = segment.tokens
        codes = np.where(authors.is_trained(tokens.authors), code, tokens.authors)
        segments.append(replace(segment, tokens=replace(tokens, authors=codes)))
    return replace(trajectory, segments=tuple(segments))
