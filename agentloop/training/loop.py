"""The sentence: collect, append, draw, update, publish, log."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from agentloop.config.seeds import derive_seed
from agentloop.errors import TrainingStopped
from agentloop.learning.scoring import ScoredBatch
from agentloop.learning.trainer import RECOMPUTED
from agentloop.learning.update_stats import ESS_BY_AGE, UpdateResult
from agentloop.records import kl_penalties, penalised_rewards
from agentloop.rollouts.dynamic_sampling import sample_dynamically
from agentloop.rollouts.evaluation import evaluate
from agentloop.rollouts.trajectories import Collected, CollectedBy
from agentloop.runs.checkpoint import complete_checkpoints, prune, save_checkpoint
from agentloop.runs.signals import StopRequest
from agentloop.training.components import Components
from agentloop.training.mixed_batch import IterationPlan, MixedBatch, as_observed, learned_rows, mix_batch
from agentloop.training.plan import TaskQueue
from agentloop.training.trace import describe_batch, describe_update
from replay.mixing.mixer import ReplayStarved
from replay.mixing.request import Availability, DrawRequest
from replay.records import BatchRow, IterationRecord
from replay.storage.write import AppendReport

_FEW_CORRUPT = 3
"""Rows that never stop a run: of a small buffer they would be a large share."""


@dataclass
class LoopState:
    """What the loop itself remembers, as a checkpoint has it; the rest of a checkpoint belongs to its parts."""

    iteration: int = 0
    """Iterations committed."""
    tasks: TaskQueue = field(default_factory=TaskQueue)
    attempt: int = 0
    """Part of the ids of what is collected: a resumed run must not reuse those of its orphans."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(iteration, held-out success), oldest first."""
    training_seconds: float = 0.0

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> LoopState:
        evaluations = [(int(i), float(s)) for i, s in values["evaluations"]]
        return cls(**{**values, "evaluations": evaluations, "tasks": TaskQueue.from_values(values["tasks"])})


class Loop:
    """One run, from its last checkpoint to its end."""

    def __init__(self, components: Components, state: LoopState, *, trace: bool = False) -> None:
        """`trace`: the display shows the data flow of the first iteration."""
        self.components = components
        self.config = components.config
        self._store, self._run_id, self._display = components.store, components.run_id, components.display
        self.state = state
        self._saved = state.iteration
        self._trace = trace

    def run(self, stop: StopRequest) -> None:
        """Iterate until the end, the success target, or a polite request to stop; a checkpoint is the last thing."""
        while not self.finished and not stop.requested:
            try:
                self.iterate(self.state.iteration + 1)
            except TrainingStopped:
                self._store.add_metrics(self._run_id, self.state.iteration + 1, {"run/stopped": 1.0})
                raise
            if self.state.iteration % self.config.checkpoint.every == 0:
                self.save()
        if self._saved != self.state.iteration:
            self.save()

    @property
    def finished(self) -> bool:
        return self.state.iteration >= self.config.run.iterations or self._target_reached()

    def iterate(self, iteration: int) -> None:
        """One composed batch: collect, append, draw, update, publish, log."""
        clock = _Clock()
        planned = self.plan(iteration)
        fresh = self.collect(iteration, planned)
        clock.lap("collect")
        appended = self.append(fresh)
        batch = self.draw(planned, fresh)
        clock.lap("draw")
        result, observed = self.update(iteration, batch)
        metrics = self.commit(iteration, batch, result, observed)
        clock.lap("update")
        self.publish(iteration)
        evicted = self.evict(iteration, appended)
        clock.lap("publish")
        self.state.training_seconds += clock.total
        later = evicted | self.update_curriculum(batch) | clock.metrics(tokens=batch.num_tokens)
        if self._evaluation_due(iteration):
            later |= self.evaluate()
        self._store.add_metrics(self._run_id, iteration, later)
        self.log(iteration, metrics | later)
        self._stop_at_corruption(iteration, rows=evicted["buffer/rows"], corrupt=evicted["buffer/quarantined"])

    def plan(self, iteration: int) -> IterationPlan:
        """What the batch is made of, given what the buffer can give."""
        parts, mixer, queue = self.components, self.components.mixer, self.state.tasks
        version, limits = parts.generator.policy_version, self.config.replay.limits
        request = DrawRequest(parts.run_id, iteration, version, limits=limits)
        replays = mixer.rule.highest_fraction > 0
        available = parts.store.available(request, parts.sampler) if replays else Availability()
        upcoming = [self._task_hash(index) for index in queue.upcoming(mixer.num_tasks)]
        try:
            plan = mixer.plan(iteration=iteration, available=available, tasks=upcoming)
        except ReplayStarved as error:
            raise TrainingStopped(str(error)) from error
        tasks = tuple(queue.upcoming(plan.num_tasks))
        return IterationPlan(plan, tasks, available, replace(request, picks=plan.picks, first_slot=plan.fresh))

    def _task_hash(self, index: int) -> str:
        return self.components.actors.factory.task_hash(self.components.source.train(index))

    def collect(self, iteration: int, planned: IterationPlan) -> Collected:
        """Act: the fresh rows of this iteration, in groups."""
        groups = [(planned.tasks[slot], size) for slot, size in planned.plan.groups]
        first = self._collect_round(iteration, groups, ())
        rounds = self.config.rollout.dynamic_sampling_rounds
        if rounds == 0:
            return first

        def further(sizes: Sequence[int], earlier: Sequence[Collected]) -> Collected:
            had = len(planned.tasks) + sum(len(round.further_tasks) for round in earlier)
            tasks = self.state.tasks.upcoming(had + len(sizes))[had:]
            newer = self._collect_round(iteration, list(zip(tasks, sizes, strict=True)), earlier)
            return replace(newer, further_tasks=tuple(tasks))

        return sample_dynamically(first, further, rounds=rounds)

    def _collect_round(
        self, iteration: int, groups: Sequence[tuple[int, int]], earlier: Sequence[Collected]
    ) -> Collected:
        parts = self.components
        # The first round's seed does not depend on whether more could follow.
        seed = derive_seed(self.config.run.seed, "collect", iteration, *([len(earlier)] if earlier else []))
        parts.generator.begin(seed=seed, temperature=self.config.rollout.temperature)
        return parts.collector.collect(
            [(parts.source.train(index), size) for index, size in groups],
            CollectedBy(parts.run_id, iteration, self.state.attempt),
            earlier=earlier,
            progress=lambda done, total: parts.display.phase("collect", done, total),
        )

    def append(self, fresh: Collected) -> AppendReport:
        """Remember: visible whole or not at all."""
        admission = self.components.admission
        groups, rows = [*fresh.groups, *fresh.unused_groups], [*fresh.trajectories, *fresh.unused]
        return self._store.append(fresh.tasks, groups, rows, admission=admission)

    def draw(self, planned: IterationPlan, fresh: Collected) -> MixedBatch:
        """Reserve this iteration's slots, fresh ones first."""
        store, request = self._store, replace(planned.request, picks=planned.picks(fresh, self.config))
        own = [replace(row, reward=fresh.rewards[row.trajectory.id]) for row in request.fresh_rows(fresh.trajectories)]
        store.reserve_fresh([row.draw for row in own if row.draw is not None])
        measure = self.components.trainer.mean_entropies
        drawn = store.draw(request, self.components.sampler, measure=measure) if request.picks else []
        if len(drawn) < request.count and self.config.replay.shortfall == "error":
            # What could be drawn when the batch was planned was corrupt, or has been taken since.
            raise TrainingStopped(str(ReplayStarved(len(drawn), planned.plan.planned_replay, request.iteration)))
        if not fresh.trajectories and not drawn:
            raise TrainingStopped(
                f"a batch must hold a trajectory, got none in iteration {request.iteration}: all of it was to be "
                f"replayed, and none of {request.count} rows could be read. They are quarantined now: --resume."
            )
        batch = mix_batch(
            planned,
            fresh,
            [*own, *drawn],
            self.config,
            estimator=self.components.estimator,
            penalty=self.components.collector.penalty,
        )
        self.state.tasks.advance(batch.tasks, without_member=batch.without_member(self._task_hash))
        return batch

    def update(self, iteration: int, batch: MixedBatch) -> tuple[UpdateResult, UpdateResult | None]:
        """Learn from both streams. Observed rows are scored apart, before the update and without a trace in it."""
        self._display.phase("update", 0, 1)
        observes = self.config.replay.mode == "observe"
        observed = None
        if observes and batch.replayed_rows:
            authors = self.components.authors
            rows = [replace(row, trajectory=as_observed(row.trajectory, authors)) for row in batch.replayed_rows]
            observed = self.components.trainer.score_only(rows)
        scored_by = self.components.generator.policy_version if self.components.scores_are_stored else None
        result = self._learn(learned_rows(batch.rows, observes=observes, scored_by=scored_by), iteration)
        self._display.phase("update", 1, 1)
        if result.metrics.get(RECOMPUTED):
            gap = result.metrics["actor/sampling_gap"]
            self._display.note(
                f"iteration {iteration}: log-probs from sampling were {gap:.2g} nats off those of the same weights, so "
                "old log-probs were recomputed. If it comes back: compute.old_log_probs: recompute."
            )
        return result, observed

    def _learn(self, rows: list[BatchRow], iteration: int) -> UpdateResult:
        trainer, display = self.components.trainer, self._display
        if not self._trace:
            return trainer.update(rows, iteration=iteration)
        self._trace = False
        decode = self.components.actors.renderer.codec.decode
        penalty = self.components.collector.penalty
        if penalty is not None:
            trajectories = [row.trajectory for row in rows]
            charged = penalised_rewards(trajectories, kl_penalties(penalty, trajectories))
            rows = [replace(row, reward=reward) for row, reward in zip(rows, charged, strict=True)]

        def show(scored: ScoredBatch) -> None:
            display.note(describe_batch(scored, penalised=penalty is not None, text=decode))

        result = trainer.update(rows, iteration=iteration, before_steps=show)
        display.note(describe_update(result))
        return result

    def commit(
        self, iteration: int, batch: MixedBatch, result: UpdateResult, observed: UpdateResult | None
    ) -> dict[str, float]:
        """The draws with what the update did to them, the iteration and its metrics, in one transaction."""
        metrics = {
            **batch.fresh.metrics(),
            **result.metrics,
            **(observed.metrics if observed else {}),
            **batch.metrics(self.config, self.components.mixer),
        }
        statistics = {**result.rows, **(observed.rows if observed else {})}
        advantages = {row.trajectory.id: row.advantage for row in batch.rows} | result.advantages
        committed = [
            replace(row.draw, advantage=advantages[row.trajectory.id], **asdict(statistics[row.trajectory.id]))
            for row in batch.rows
            if row.draw is not None
        ]
        record = IterationRecord(
            run=self._run_id,
            iteration=iteration,
            policy_version=self.components.generator.policy_version,
            planned_fresh=batch.planned.plan.planned_fresh,
            planned_replay=batch.planned.plan.planned_replay,
            fresh=len(batch.fresh.trajectories),
            replay=len(batch.replayed_rows),
            fraction=batch.planned.plan.fraction,
            optimizer_steps=result.optimizer_steps,
            metrics=metrics,
            histograms=result.histograms + (observed.histograms if observed else ()),
        )
        self._store.commit(record, committed, sampler_state=self.components.sampler.state())
        ess = {name: value for name, value in metrics.items() if name.startswith(ESS_BY_AGE)}
        self.components.mixer.feed(success_rate=metrics.get("rollout/success"), ess_by_age=ess)
        self.state.iteration = iteration
        return metrics

    def update_curriculum(self, batch: MixedBatch) -> dict[str, float]:
        """Which tasks succeed how often decides which come next, under a curriculum."""
        pending = self.state.tasks.pending
        done = [index for index in batch.tasks if index not in pending]
        groups = [*batch.fresh.groups, *batch.fresh.unused_groups]
        self.components.source.record_success(done, [(group.task, group.size, group.success_rate) for group in groups])
        return self.components.source.metrics()

    def publish(self, version: int) -> None:
        self.components.publisher.publish(version)

    def evict(self, iteration: int, appended: AppendReport) -> dict[str, float]:
        """Remove what the buffer has no room for."""
        version = self.components.generator.policy_version
        capacity = self.config.replay.capacity
        counts = self._store.evict(self._run_id, iteration, policy_version=version, capacity=capacity)
        return counts | {"buffer/same_tokens": appended.same_tokens, "buffer/redacted": appended.redacted}

    def evaluate(self) -> dict[str, float]:
        """Held-out success, remembered for the target and the closing line."""
        result = evaluate(
            self.components.actors,
            self.components.source,
            self.config,
            progress=lambda done, total: self._display.phase("evaluate", done, total),
        )
        self.state.evaluations.append((self.state.iteration, result.success))
        return result.metrics()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """To people and to the sinks; the database has it already."""
        self.components.sinks.log(iteration, metrics)
        self._display.iteration(iteration, self.config.run.iterations, metrics)

    def save(self) -> None:
        """A full checkpoint of this moment."""
        self._store.refuse_replaced(self._run_id)
        trainer = self.components.trainer
        state = {
            "run": self._run_id,
            "loop": asdict(self.state),
            "trainer": trainer.values(),
            "sampler": self.components.sampler.state(),
            "mixer": self.components.mixer.state(),
            "source": self.components.source.state(),
        }
        folder = self.components.folder.checkpoints
        save_checkpoint(
            folder / f"{self.state.iteration:06d}", self.components.publisher.save_model, trainer.save, state
        )
        oldest = complete_checkpoints(folder)[-self.config.checkpoint.keep :][0]
        # No resume goes back before the oldest checkpoint: what was evicted up to it is not needed again. It is refused
        # where another process has taken the run over, which may have begun from one that would be removed.
        self._store.purge(self._run_id, int(oldest.name))
        prune(folder, keep=self.config.checkpoint.keep)
        self._saved = self.state.iteration

    def _stop_at_corruption(self, iteration: int, *, rows: float, corrupt: float) -> None:
        """A row that went bad is replaced by another draw; many of them say that the disk goes bad."""
        limit = self.config.replay.max_quarantined
        if corrupt > max(_FEW_CORRUPT, limit * rows):
            raise TrainingStopped(
                f"rows quarantined as corrupt must be at most replay.max_quarantined={limit:g} of the buffer, got "
                f"{corrupt:g} of {rows:g} after iteration {iteration} at {self._store.url}. "
                "Look for a failing disk, and remove them before --resume: "
                "agentloop replay prune --where \"state == 'quarantined'\" --yes"
            )

    def _evaluation_due(self, iteration: int) -> bool:
        every = self.config.evaluation.every
        return iteration == self.config.run.iterations or (every > 0 and iteration % every == 0)

    def _target_reached(self) -> bool:
        target = self.config.run.stop_at_success
        last_two = [success for _, success in self.state.evaluations[-2:]]
        return target is not None and len(last_two) == 2 and min(last_two) >= target


class _Clock:
    """Seconds per phase of one iteration."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._laps[phase] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return sum(self._laps.values())

    def metrics(self, *, tokens: int) -> dict[str, float]:
        laps = {f"time/{phase}": seconds for phase, seconds in self._laps.items()}
        return laps | {"time/iteration": self.total, "speed/tokens_per_second": tokens / self.total}
