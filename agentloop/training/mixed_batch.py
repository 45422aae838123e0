"""One iteration's batch: it is planned, then mixed from collected and drawn rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentloop.config import RunConfig
from agentloop.records import Penalty, kl_penalties, penalised_rewards
from agentloop.rollouts.trajectories import Collected
from agentloop.training.advantage_estimator import AdvantageEstimator
from context.authors import LLM_DO_NOT_TRAIN, AuthorTable
from replay.mixing.batch_plan import BatchPlan, Mixer
from replay.mixing.request import Availability, DrawRequest
from replay.records import FRESH, REPLAY, BatchRow, Trajectory


@dataclass(frozen=True)
class IterationPlan:
    """The plan of a batch, before anything is collected."""

    plan: BatchPlan
    tasks: tuple[int, ...]
    """Index of the training task of each slot."""
    available: Availability
    request: DrawRequest


@dataclass(frozen=True)
class MixedBatch:
    """The rows of one iteration's batch."""

    planned: IterationPlan
    fresh: Collected
    rows: list[BatchRow]
    """Fresh rows first, with the advantages that they are trained with."""
    advantage_metrics: Mapping[str, float]

    @property
    def replayed_rows(self) -> list[BatchRow]:
        return [row for row in self.rows if row.stream == REPLAY]

    @property
    def tasks(self) -> tuple[int, ...]:
        """Indices of the batch's training tasks: the planned tasks, and tasks of further rounds."""
        return (*self.planned.tasks, *self.fresh.further_tasks)

    @property
    def num_tokens(self) -> int:
        return sum(row.trajectory.record.num_tokens for row in self.rows)

    def without_member(self, task_hash: Callable[[int], str]) -> list[int]:
        """The tasks without any row in the batch, because an engine failed or a stored row was corrupt."""
        groups = [*self.fresh.groups, *self.fresh.unused_groups]
        if len(groups) == len(self.tasks):
            return []
        there = {group.task for group in groups} | {row.trajectory.record.task for row in self.replayed_rows}
        return [index for index in self.tasks if task_hash(index) not in there]

    def metrics(self, config: RunConfig, mixer: Mixer) -> dict[str, float]:
        """Metrics of the configured, ruled and achieved composition, and of the buffer's shortfall."""
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
        for source, count in plan.planned_sources.items():
            found = sum(row.trajectory.record.source == source for row in drawn)
            metrics |= {f"batch/planned_source/{source}": count, f"batch/source/{source}": found}
        draws = [row.draw for row in drawn if row.draw is not None]
        stale = [draw.staleness for draw in draws if draw.staleness is not None]
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
    """Make the batch of `rows`, fresh ones first, with the advantages that they are trained with.

    With `replay.baseline: stored` rows keep their advantages. Any other baseline computes all advantages again, from
    rewards less the current policy's KL penalty.
    """
    baseline = config.replay.baseline if config.replay.mode == "train" else "stored"
    if baseline != "stored":
        stored = [row.trajectory for row in rows if row.stream == REPLAY]  # fresh rewards are less the penalty already
        rewards = iter(penalised_rewards(stored, kl_penalties(penalty, stored)))
        rows = [replace(row, reward=next(rewards)) if row.stream == REPLAY else row for row in rows]
    mixed, metrics = estimator.advantages_for_batch(rows, baseline)
    return MixedBatch(planned, fresh, mixed, metrics)


def learned_rows(rows: Sequence[BatchRow], *, observes: bool, scored_by: int | None) -> list[BatchRow]:
    """The rows that the trainer gets, in the order of their slots; without replayed rows if these are only observed.

    `scored_by` is the policy's version, if log-probs from sampling agree with those from scoring.
    """

    def is_scored(row: BatchRow) -> bool:
        """Whether this policy sampled the whole row, in the same context that the row is trained in."""
        record, plain = row.trajectory.record, (s.behavior_context == "plain" for s in row.trajectory.segments)
        sampled_now = record.policy_version_min == record.policy_version_max == scored_by
        return scored_by is not None and row.stream == FRESH and sampled_now and all(plain)

    return [replace(row, scored=is_scored(row)) for row in rows if row.stream == FRESH or not observes]


def as_observed(trajectory: Trajectory, authors: AuthorTable) -> Trajectory:
    """A copy of a trajectory without loss: the author of its trained tokens is `llm(do_not_train)`."""
    code = np.uint8(authors.code(LLM_DO_NOT_TRAIN))
    segments = []
    for segment in trajectory.segments:
        tokens = segment.tokens
        codes = np.where(authors.is_trained(tokens.authors), code, tokens.authors)
        segments.append(replace(segment, tokens=replace(tokens, authors=codes)))
    return replace(trajectory, segments=tuple(segments))
