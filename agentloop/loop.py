"""The sentence: collect, append, draw, update, publish, log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from agentloop.assemble import Parts
from agentloop.batch import BatchRow
from agentloop.checkpoint import complete_checkpoints, prune, save_checkpoint
from agentloop.collect import Birth, Collected, collect
from agentloop.errors import TrainingStopped
from agentloop.evaluate import evaluate
from agentloop.seeds import derive_seed
from agentloop.signals import StopRequest
from agentloop.trainer import UpdateResult
from replay.mixing import BatchPlan, group_sizes, plan_batch
from replay.observe import as_observed
from replay.records import FRESH, DrawRecord, IterationRecord
from replay.request import DrawRequest, Limits, Pick
from replay.store import AppendReport, Drawn


@dataclass
class LoopState:
    """What the loop itself remembers; the rest of a checkpoint belongs to its parts."""

    iteration: int = 0
    """Iterations committed."""
    next_task: int = 0
    """Index of the next training task."""
    attempt: int = 0
    """Part of the ids of what is collected: a resumed run must not reuse those of its orphans."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(iteration, held-out success), oldest first."""
    training_seconds: float = 0.0

    def to_values(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> LoopState:
        evaluations = [(int(i), float(s)) for i, s in values["evaluations"]]
        return cls(**{**values, "evaluations": evaluations})


@dataclass(frozen=True)
class Composition:
    """What went into one iteration's batch."""

    plan: BatchPlan
    fresh: Collected
    fresh_draws: list[DrawRecord]
    drawn: list[Drawn]


class Loop:
    """One run, from its last checkpoint to its end."""

    def __init__(self, parts: Parts, state: LoopState) -> None:
        self.parts = parts
        self.config = parts.config
        self.state = state
        self._saved = state.iteration

    def run(self, stop: StopRequest) -> None:
        """Iterate until the end, the success target, or a polite request to stop; a checkpoint is the last thing."""
        while not self.finished and not stop.requested:
            try:
                self.iterate(self.state.iteration + 1)
            except TrainingStopped:
                self.parts.store.add_metrics(self.parts.run_id, self.state.iteration + 1, {"run/stopped": 1.0})
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
        plan, request = self.plan(iteration)
        fresh = self.collect(iteration, plan)
        clock.lap("collect")
        appended = self.append(fresh)
        batch = self.draw(plan, request, fresh)
        clock.lap("draw")
        result, observed = self.update(iteration, batch)
        metrics = self.commit(iteration, batch, result, observed)
        clock.lap("update")
        self.publish(iteration)
        kept = self.keep(iteration, appended)
        clock.lap("publish")
        self.state.training_seconds += clock.total
        later = kept | clock.metrics(tokens=_tokens(batch))
        if self._evaluation_due(iteration):
            later |= self.evaluate()
        self.parts.store.add_metrics(self.parts.run_id, iteration, later)
        self.log(iteration, metrics | later)

    def plan(self, iteration: int) -> tuple[BatchPlan, DrawRequest]:
        """How many rows of each stream, given what the buffer can give."""
        replay = self.config.replay
        request = DrawRequest(
            run=self.parts.run_id,
            iteration=iteration,
            policy_version=self.parts.generator.policy_version,
            limits=Limits(successful_only=replay.successful_only),
        )
        fraction = self.config.replay_fraction(iteration)
        available = self.parts.store.available(request, self.parts.sampler).rows if fraction > 0 else 0
        plan = plan_batch(self.config.batch.trajectories, fraction, available=available, mode=replay.mode)
        return plan, replace(request, picks=(Pick(plan.replay),), first_slot=plan.fresh)

    def collect(self, iteration: int, plan: BatchPlan) -> Collected:
        """Act: the fresh rows of this iteration, in groups."""
        sizes = group_sizes(plan.fresh, self.config.batch.group_size)
        groups = [(self.parts.source.train(self.state.next_task + i), size) for i, size in enumerate(sizes)]
        self.state.next_task += len(sizes)
        seed = derive_seed(self.config.run.seed, "collect", iteration)
        self.parts.generator.begin(seed=seed, temperature=self.config.rollout.temperature)
        birth = Birth(self.parts.run_id, iteration, self.state.attempt)
        return collect(
            self.parts.actors,
            groups,
            birth,
            self.config,
            penalty=self.parts.penalty,
            progress=lambda done, total: self.parts.display.phase("collect", done, total),
        )

    def append(self, fresh: Collected) -> AppendReport:
        """Remember: visible whole or not at all."""
        admission = self.parts.admission
        return self.parts.store.append(fresh.tasks, fresh.groups, fresh.trajectories, admission=admission)

    def draw(self, plan: BatchPlan, request: DrawRequest, fresh: Collected) -> Composition:
        """Reserve this iteration's slots, fresh ones first."""
        fresh_draws = [
            DrawRecord(
                run=self.parts.run_id,
                iteration=request.iteration,
                slot=slot,
                trajectory=trajectory.id,
                stream=FRESH,
                probability=None,
                staleness=request.policy_version - trajectory.record.policy_version_min,
            )
            for slot, trajectory in enumerate(fresh.trajectories)
        ]
        self.parts.store.reserve_fresh(fresh_draws)
        drawn = self.parts.store.draw(request, self.parts.sampler) if plan.replay else []
        return Composition(plan, fresh, fresh_draws, drawn)

    def update(self, iteration: int, batch: Composition) -> tuple[UpdateResult, UpdateResult | None]:
        """Learn from both streams. Observed rows are scored apart, before the update and without a trace in it."""
        self.parts.display.phase("update", 0, 1)
        fresh = [BatchRow(t, "fresh", t.record.advantage) for t in batch.fresh.trajectories]
        replayed = [BatchRow(d.trajectory, "replay", d.trajectory.record.advantage) for d in batch.drawn]
        observed = None
        if self.config.replay.mode == "observe":
            rows = [replace(row, trajectory=as_observed(row.trajectory, self.parts.authors)) for row in replayed]
            observed = self.parts.trainer.observe(rows) if rows else None
            replayed = []
        result = self.parts.trainer.update(fresh + replayed, iteration=iteration)
        self.parts.display.phase("update", 1, 1)
        return result, observed

    def commit(
        self, iteration: int, batch: Composition, result: UpdateResult, observed: UpdateResult | None
    ) -> dict[str, float]:
        """The draws with what the update did to them, the iteration and its metrics, in one transaction."""
        metrics = _metrics(batch, result, observed, trajectories=self.config.batch.trajectories)
        statistics = {**result.rows, **(observed.rows if observed else {})}
        draws = [*batch.fresh_draws, *(drawn.draw for drawn in batch.drawn)]
        advantages = {t.id: t.record.advantage for t in batch.fresh.trajectories}
        advantages |= {d.trajectory.id: d.trajectory.record.advantage for d in batch.drawn}
        committed = [
            replace(draw, advantage=advantages[draw.trajectory], **asdict(statistics[draw.trajectory]))
            for draw in draws
        ]
        record = IterationRecord(
            run=self.parts.run_id,
            iteration=iteration,
            policy_version=self.parts.generator.policy_version,
            planned_fresh=batch.plan.planned_fresh,
            planned_replay=batch.plan.planned_replay,
            fresh=len(batch.fresh.trajectories),
            replay=len(batch.drawn),
            fraction=batch.plan.fraction,
            optimizer_steps=result.optimizer_steps,
            metrics=metrics,
        )
        self.parts.store.commit(record, committed, sampler_state=self.parts.sampler.state())
        self.state.iteration = iteration
        return metrics

    def publish(self, version: int) -> None:
        self.parts.publisher.publish(version, self.config.checkpoint)

    def keep(self, iteration: int, appended: AppendReport) -> dict[str, float]:
        """Let go of what the buffer has no room for."""
        version = self.parts.generator.policy_version
        counts = self.parts.store.evict(
            self.parts.run_id, iteration, policy_version=version, capacity=self.parts.capacity
        )
        return counts | {"buffer/same_tokens": appended.same_tokens, "buffer/redacted": appended.redacted}

    def evaluate(self) -> dict[str, float]:
        """Held-out success, remembered for the target and the closing line."""
        result = evaluate(
            self.parts.actors,
            self.parts.source,
            self.config,
            progress=lambda done, total: self.parts.display.phase("evaluate", done, total),
        )
        self.state.evaluations.append((self.state.iteration, result.success))
        return result.metrics()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """To people and to the sinks; the database has it already."""
        self.parts.sinks.log(iteration, metrics)
        self.parts.display.iteration(iteration, self.config.run.iterations, metrics)

    def save(self) -> None:
        """A full checkpoint of this moment."""
        # What a resume trusts to be there up to this iteration must be there.
        self.parts.sinks.flush()
        tensors, values = self.parts.trainer.state()
        state = {
            "run": self.parts.run_id,
            "loop": self.state.to_values(),
            "trainer": values,
            "sampler": self.parts.sampler.state(),
        }
        folder = self.parts.folder.checkpoints
        save_checkpoint(folder / f"{self.state.iteration:06d}", self.parts.publisher.save_model, tensors, state)
        prune(folder, keep=self.config.checkpoint.keep)
        # No resume goes back before the oldest checkpoint: what was evicted up to it is not needed again.
        self.parts.store.purge(self.parts.run_id, int(complete_checkpoints(folder)[0].name))
        self._saved = self.state.iteration

    def _evaluation_due(self, iteration: int) -> bool:
        every = self.config.evaluation.every
        return iteration == self.config.run.iterations or (every > 0 and iteration % every == 0)

    def _target_reached(self) -> bool:
        target = self.config.run.stop_at_success
        last_two = [success for _, success in self.state.evaluations[-2:]]
        return target is not None and len(last_two) == 2 and min(last_two) >= target


def _metrics(
    batch: Composition, result: UpdateResult, observed: UpdateResult | None, *, trajectories: int
) -> dict[str, float]:
    """Everything measured in this iteration but its times."""
    stale = [d.draw.staleness for d in batch.drawn if d.draw.staleness is not None]
    metrics = {
        **batch.fresh.metrics(),
        **result.metrics,
        **(observed.metrics if observed else {}),
        "batch/planned_fresh": batch.plan.planned_fresh,
        "batch/planned_replay": batch.plan.planned_replay,
        "batch/fresh": len(batch.fresh.trajectories),
        "batch/replay": len(batch.drawn),
        "batch/fraction": batch.plan.fraction,
        "batch/achieved_fraction": len(batch.drawn) / trajectories,
        "batch/shortfall": batch.plan.planned_replay - len(batch.drawn),
        "batch/fresh_shortfall": batch.plan.fresh - len(batch.fresh.trajectories),
    }
    if stale:
        metrics |= {"replay/staleness_mean": sum(stale) / len(stale), "replay/staleness_max": max(stale)}
    return {name: float(value) for name, value in metrics.items()}


def _tokens(batch: Composition) -> int:
    rows = [*batch.fresh.trajectories, *(drawn.trajectory for drawn in batch.drawn)]
    return sum(row.record.num_tokens for row in rows)


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
