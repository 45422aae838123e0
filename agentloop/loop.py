"""The sentence: collect, append, draw, update, publish, log."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from agentloop.assemble import Parts
from agentloop.checkpoint import complete_checkpoints, prune, save_checkpoint
from agentloop.collect import Birth, Collected, collect
from agentloop.composing import Composition, Planned, batch_advantages, completed_advantages, fresh_records
from agentloop.errors import TrainingStopped
from agentloop.evaluate import evaluate
from agentloop.learning.batch import BatchRow
from agentloop.learning.scoring import ScoredBatch
from agentloop.learning.trainer import RECOMPUTED, UpdateResult
from agentloop.learning.update_stats import ESS_BY_AGE
from agentloop.recollect import recollect
from agentloop.seeds import derive_seed
from agentloop.signals import StopRequest
from agentloop.task_line import TaskLine
from agentloop.trace import describe_batch, describe_update
from replay.mixing.mixer import ReplayStarved
from replay.mixing.request import Availability, DrawRequest
from replay.observe import as_observed
from replay.records import DrawRecord, IterationRecord, Trajectory
from replay.store import AppendReport, Drawn

_FEW_CORRUPT = 3
"""Rows that never stop a run: of a small buffer they would be a large share."""


@dataclass
class LoopState:
    """What the loop itself remembers; the rest of a checkpoint belongs to its parts."""

    iteration: int = 0
    """Iterations committed."""
    tasks: TaskLine = field(default_factory=TaskLine)
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
        return cls(**{**values, "evaluations": evaluations, "tasks": TaskLine(**values["tasks"])})


class Loop:
    """One run, from its last checkpoint to its end."""

    def __init__(self, parts: Parts, state: LoopState, *, trace: bool = False) -> None:
        """`trace`: the display is told the data flow of the first iteration."""
        self.parts = parts
        self.config = parts.config
        self.state = state
        self._saved = state.iteration
        self._trace = trace

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
        kept = self.keep(iteration, appended)
        clock.lap("publish")
        self.state.training_seconds += clock.total
        later = kept | self.follow(batch) | clock.metrics(tokens=_tokens(batch))
        if self._evaluation_due(iteration):
            later |= self.evaluate()
        self.parts.store.add_metrics(self.parts.run_id, iteration, later)
        self.log(iteration, metrics | later)
        self._stop_at_corruption(iteration, rows=kept["buffer/rows"], corrupt=kept["buffer/quarantined"])

    def plan(self, iteration: int) -> Planned:
        """What the batch is made of, given what the buffer can give."""
        parts, mixer, line = self.parts, self.parts.mixer, self.state.tasks
        version, limits = parts.generator.policy_version, self.config.replay.limits
        request = DrawRequest(parts.run_id, iteration, version, limits=limits)
        replays = mixer.rule.highest_fraction > 0
        available = parts.store.available(request, parts.sampler) if replays else Availability()
        upcoming = [self._task_hash(index) for index in line.upcoming(mixer.num_tasks)]
        try:
            plan = mixer.plan(iteration=iteration, available=available, tasks=upcoming)
        except ReplayStarved as error:
            raise TrainingStopped(str(error)) from error
        tasks = tuple(line.upcoming(plan.num_tasks))
        return Planned(plan, tasks, available, replace(request, picks=plan.picks, first_slot=plan.fresh))

    def _task_hash(self, index: int) -> str:
        return self.parts.actors.factory.task_hash(self.parts.source.train(index))

    def collect(self, iteration: int, planned: Planned) -> Collected:
        """Act: the fresh rows of this iteration, in groups."""
        groups = [(planned.tasks[slot], size) for slot, size in planned.plan.groups]
        first = self._collect_round(iteration, groups, ())
        rounds = self.config.rollout.recollect_rounds
        if rounds == 0:
            return first

        def further(sizes: Sequence[int], before: Sequence[Collected]) -> Collected:
            had = len(planned.tasks) + sum(len(earlier.further_tasks) for earlier in before)
            tasks = self.state.tasks.upcoming(had + len(sizes))[had:]
            newer = self._collect_round(iteration, list(zip(tasks, sizes, strict=True)), before)
            return replace(newer, further_tasks=tuple(tasks))

        return recollect(first, further, rounds=rounds)

    def _collect_round(
        self, iteration: int, groups: Sequence[tuple[int, int]], before: Sequence[Collected]
    ) -> Collected:
        parts = self.parts
        # The first round's seed does not depend on whether more could follow.
        seed = derive_seed(self.config.run.seed, "collect", iteration, *([len(before)] if before else []))
        parts.generator.begin(seed=seed, temperature=self.config.rollout.temperature)
        return collect(
            parts.actors,
            [(parts.source.train(index), size) for index, size in groups],
            Birth(parts.run_id, iteration, self.state.attempt),
            self.config,
            valuation=parts.valuation,
            before=before,
            progress=lambda done, total: parts.display.phase("collect", done, total),
        )

    def append(self, fresh: Collected) -> AppendReport:
        """Remember: visible whole or not at all."""
        admission = self.parts.admission
        groups, rows = [*fresh.groups, *fresh.spare_groups], [*fresh.trajectories, *fresh.spare]
        return self.parts.store.append(fresh.tasks, groups, rows, admission=admission)

    def draw(self, planned: Planned, fresh: Collected) -> Composition:
        """Reserve this iteration's slots, fresh ones first."""
        store, request = self.parts.store, replace(planned.request, picks=planned.picks(fresh, self.config))
        fresh_draws = fresh_records(request.run, request.iteration, request.policy_version, fresh.trajectories)
        store.reserve_fresh(fresh_draws)
        measure = self.parts.trainer.mean_entropies
        drawn = store.draw(request, self.parts.sampler, measure=measure) if request.picks else []
        if len(drawn) < request.count and self.config.replay.shortfall == "error":
            # What could be drawn when the batch was planned was corrupt, or has been taken since.
            raise TrainingStopped(str(ReplayStarved(len(drawn), planned.plan.planned_replay, request.iteration)))
        if not fresh.trajectories and not drawn:
            raise TrainingStopped(
                f"a batch must hold a trajectory, got none in iteration {request.iteration}: all of it was to be "
                f"replayed, and none of {request.count} rows could be read. They are quarantined now: --resume."
            )
        batch = self._composed(planned, fresh, fresh_draws, drawn)
        self.state.tasks.advance(batch.tasks, without_member=batch.without_member(self._task_hash))
        return batch

    def _composed(
        self, planned: Planned, fresh: Collected, fresh_draws: list[DrawRecord], drawn: list[Drawn]
    ) -> Composition:
        replay, valuation = self.config.replay, self.parts.valuation
        baseline = replay.baseline if replay.mode == "train" else "stored"
        completed: dict[str, float] = {}
        if replay.complete_zero_variance and baseline == "stored":
            completed = completed_advantages(fresh, drawn, valuation)
        advantages = batch_advantages(fresh, drawn, completed, valuation=valuation, baseline=baseline)
        return Composition(planned, fresh, fresh_draws, drawn, completed, advantages)

    def update(self, iteration: int, batch: Composition) -> tuple[UpdateResult, UpdateResult | None]:
        """Learn from both streams. Observed rows are scored apart, before the update and without a trace in it."""
        self.parts.display.phase("update", 0, 1)
        fresh, replayed = batch.rows()
        fresh = [replace(row, scored=self._is_scored(row.trajectory)) for row in fresh]
        observed = None
        if self.config.replay.mode == "observe":
            rows = [replace(row, trajectory=as_observed(row.trajectory, self.parts.authors)) for row in replayed]
            observed = self.parts.trainer.observe(rows) if rows else None
            replayed = []
        result = self._learn(fresh + replayed, iteration)
        self.parts.display.phase("update", 1, 1)
        if result.metrics.get(RECOMPUTED):
            gap = result.metrics["actor/sampling_gap"]
            self.parts.display.note(
                f"iteration {iteration}: log-probs from sampling were {gap:.2g} nats off those of the same weights, so "
                "old log-probs were recomputed. If it comes back: compute.old_log_probs: recompute."
            )
        return result, observed

    def _is_scored(self, row: Trajectory) -> bool:
        """Whether the policy as it is sampled all of it, in sight of what it is trained on."""
        now = self.parts.generator.policy_version
        record = row.record
        return (
            self.parts.scores_are_stored
            and record.policy_version_min == record.policy_version_max == now
            and all(segment.behavior_context == "plain" for segment in row.segments)
        )

    def _learn(self, rows: list[BatchRow], iteration: int) -> UpdateResult:
        trainer, display, valuation = self.parts.trainer, self.parts.display, self.parts.valuation
        if not self._trace:
            return trainer.update(rows, iteration=iteration)
        self._trace = False
        decode = self.parts.actors.renderer.codec.decode
        worth = None if valuation.penalty is None else valuation.worth([row.trajectory for row in rows])

        def told(scored: ScoredBatch) -> None:
            display.note(describe_batch(scored, rows, worth=worth, text=decode))

        result = trainer.update(rows, iteration=iteration, told=told)
        display.note(describe_update(result))
        return result

    def commit(
        self, iteration: int, batch: Composition, result: UpdateResult, observed: UpdateResult | None
    ) -> dict[str, float]:
        """The draws with what the update did to them, the iteration and its metrics, in one transaction."""
        metrics = {
            **batch.fresh.metrics(),
            **result.metrics,
            **(observed.metrics if observed else {}),
            **batch.metrics(self.config, self.parts.mixer),
        }
        statistics = {**result.rows, **(observed.rows if observed else {})}
        draws = [*batch.fresh_draws, *(drawn.draw for drawn in batch.drawn)]
        advantages = {row.trajectory.id: row.advantage for rows in batch.rows() for row in rows} | result.advantages
        committed = [
            replace(draw, advantage=advantages[draw.trajectory], **asdict(statistics[draw.trajectory]))
            for draw in draws
        ]
        record = IterationRecord(
            run=self.parts.run_id,
            iteration=iteration,
            policy_version=self.parts.generator.policy_version,
            planned_fresh=batch.planned.plan.planned_fresh,
            planned_replay=batch.planned.plan.planned_replay,
            fresh=len(batch.fresh.trajectories),
            replay=len(batch.drawn),
            fraction=batch.planned.plan.fraction,
            optimizer_steps=result.optimizer_steps,
            metrics=metrics,
            histograms=result.histograms + (observed.histograms if observed else ()),
        )
        self.parts.store.commit(record, committed, sampler_state=self.parts.sampler.state())
        ess = {name: value for name, value in metrics.items() if name.startswith(ESS_BY_AGE)}
        self.parts.mixer.observe(success_rate=metrics.get("rollout/success"), ess_by_age=ess)
        self.state.iteration = iteration
        return metrics

    def follow(self, batch: Composition) -> dict[str, float]:
        """Which tasks succeed how often decides which come next, under a curriculum."""
        owed = self.state.tasks.owed
        done = [index for index in batch.tasks if index not in owed]
        groups = [*batch.fresh.groups, *batch.fresh.spare_groups]
        self.parts.source.observe(done, [(group.task, group.size, group.success_rate) for group in groups])
        return self.parts.source.metrics()

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
        self.parts.store.refuse_replaced(self.parts.run_id)
        # What a resume trusts to be there up to this iteration must be there.
        self.parts.sinks.flush()
        trainer = self.parts.trainer
        state = {
            "run": self.parts.run_id,
            "loop": self.state.to_values(),
            "trainer": trainer.values(),
            "sampler": self.parts.sampler.state(),
            "mixer": self.parts.mixer.state(),
            "source": self.parts.source.state(),
        }
        folder = self.parts.folder.checkpoints
        save_checkpoint(folder / f"{self.state.iteration:06d}", self.parts.publisher.save_model, trainer.save, state)
        oldest = complete_checkpoints(folder)[-self.config.checkpoint.keep :][0]
        # No resume goes back before the oldest checkpoint: what was evicted up to it is not needed again. It is refused
        # where another process has taken the run over, which may have begun from one that would be removed.
        self.parts.store.purge(self.parts.run_id, int(oldest.name))
        prune(folder, keep=self.config.checkpoint.keep)
        self._saved = self.state.iteration

    def _stop_at_corruption(self, iteration: int, *, rows: float, corrupt: float) -> None:
        """A row that went bad is replaced by another draw; many of them say that the disk goes bad."""
        limit = self.config.replay.max_quarantined
        if corrupt > max(_FEW_CORRUPT, limit * rows):
            raise TrainingStopped(
                f"rows quarantined as corrupt must be at most replay.max_quarantined={limit:g} of the buffer, got "
                f"{corrupt:g} of {rows:g} after iteration {iteration} at {self.parts.store.url}. Look for a failing "
                "disk, and let go of them before --resume: agentloop replay prune --where \"state='quarantined'\" --yes"
            )

    def _evaluation_due(self, iteration: int) -> bool:
        every = self.config.evaluation.every
        return iteration == self.config.run.iterations or (every > 0 and iteration % every == 0)

    def _target_reached(self) -> bool:
        target = self.config.run.stop_at_success
        last_two = [success for _, success in self.state.evaluations[-2:]]
        return target is not None and len(last_two) == 2 and min(last_two) >= target


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
