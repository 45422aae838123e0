"""The loop of a run: collect, append, draw, update, publish, log."""

import json
import re
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from agentloop.engines.publish.engine_control import EngineRefused
from agentloop.engines.publish.proof import ProofFailed
from agentloop.engines.serving.served_engine import EngineEnded
from agentloop.errors import TrainingStopped, UserError
from agentloop.learning.optimizer import RECOMPUTED
from agentloop.learning.update_stats import UpdateResult
from agentloop.rollouts.trajectories import Collected, environment_metrics
from agentloop.runs.checkpoint import keep_only, prune, save_checkpoint, write_directory
from agentloop.runs.run_folder import complete_checkpoints
from agentloop.runs.signals import StopRequest
from agentloop.training.collecting.by_loop import LoopCollection
from agentloop.training.collecting.by_workers import WorkerCollection
from agentloop.training.collecting.collection import BatchForgotten, Collection, StoppedWaiting
from agentloop.training.components import Components, reasons_for_empty_sources
from agentloop.training.loop_state import LoopState
from agentloop.training.mixed_batch import IterationPlan, MixedBatch, as_observed, learned_rows, mix_batch
from agentloop.training.pace import Pace, PhaseClock
from replay.diagnosis import SIGNS, trouble
from replay.questions import metric_series
from replay.records import IterationRecord

_FEW_CORRUPT = 3
"""Number of corrupt rows that never stops a run: in a small buffer they would be a large share."""
_FEW_FIT = "no more rows fit the batch's tasks and the limits of replay."


class Loop:
    """One run, from its last checkpoint to its end."""

    def __init__(self, components: Components, state: LoopState) -> None:
        self.components = components
        self.config = components.config
        self._store, self._run_id, self._display = components.store, components.run_id, components.display
        self.state = state
        self._stop = StopRequest()
        self.collection: Collection = LoopCollection(components, state)
        if self.config.collection.by == "workers":
            self.collection = WorkerCollection(components, state, stopped=lambda: self._stop.requested)
        self._saved = state.iteration if state.evaluations else None  # the first checkpoint has the first evaluation
        self._saved_best = state.best_name
        self._settings, self.troubles = components.folder.stored_config(), set[str]()
        self._shortfalls: set[str] = set()
        """Reasons that were shown, without their numbers."""
        self.pace = Pace(self.config, iteration=state.iteration)

    def run(self, stop: StopRequest) -> None:
        """Iterate until the end, the success target, or a request to stop; then save a checkpoint."""
        self._stop = stop
        try:
            self.pace.begin()
            while not self.finished and not stop.requested:
                with suppress(BatchForgotten):  # the iteration is planned again, with the next batch
                    self.iterate(self.state.iteration + 1)
                if self.state.iteration % self.config.checkpoint.every == 0:
                    self.save()
        except StoppedWaiting:
            pass
        except (ProofFailed, EngineRefused, EngineEnded):
            # The last update is made and stored, so another engine may go on from it.
            self.save()
            raise
        except TrainingStopped:
            self._store.add_metrics(self._run_id, self.state.iteration + 1, {"run/stopped": 1.0})
            raise
        self.save()

    @property
    def finished(self) -> bool:
        return self.state.end(self.config.run) is not None

    def iterate(self, iteration: int) -> None:
        """Make one iteration: collect, append, draw, update, publish, log."""
        parts, clock = self.components, PhaseClock()
        planned = self.collection.plan(iteration)
        fresh = self.collect(planned)
        clock.lap("collect")
        if parts.publisher.sleep():
            clock.lap("sleep")
        appended = self.collection.append(fresh)
        fresh.extra_metrics |= self.relabel(iteration, fresh)
        batch = self.draw(planned, fresh)
        self.note_shortfall(batch)
        clock.lap("draw")
        parts.publisher.remember(batch.fresh.trajectories or [row.trajectory for row in batch.rows])
        result, observed = self.update(iteration, batch)
        metrics = self.commit(iteration, batch, result, observed)
        clock.lap("update")
        parts.publisher.publish(iteration)
        later = self._store.evict(self._run_id, iteration, self.config.replay.capacity)
        later["buffer/redacted"] = appended.redacted
        clock.lap("publish")
        later |= clock.metrics(tokens=batch.num_tokens) | dict(parts.publisher.seconds)
        if self.pace.is_evaluated(iteration):
            later |= self.evaluate()
        self._store.add_metrics(self._run_id, iteration, later)
        shown, left = metrics | later, self.pace.seconds_left(iteration)
        parts.sinks.log(iteration, shown)
        self._display.iteration(iteration, self.config.run.iterations, shown, left=left)
        self.note_trouble()
        self._stop_at_corruption(iteration, rows=later["buffer/rows"], corrupt=later["buffer/quarantined"])

    def note_trouble(self, *, at_end: bool = False) -> None:
        """Show the present sign of trouble, `at_end` also one that was shown before."""
        found = trouble(metric_series(self._store, self._run_id, names=SIGNS), self._settings, at_end=at_end)
        if found is not None and (at_end or found.limit not in self.troubles):
            self.troubles.add(found.limit)
            self._display.note(found.text)

    def collect(self, planned: IterationPlan) -> Collected:
        try:
            return self.collection.collect(planned)
        except UserError:
            self.components.publisher.check()  # every episode fails where the engine has ended
            raise

    def relabel(self, iteration: int, fresh: Collected) -> dict[str, float]:
        """Store the tasks that failed episodes did solve, for draws of later iterations."""
        if self.components.hindsight is None:
            return {}
        failed = [*fresh.trajectories, *fresh.unused]
        found = self.components.hindsight.relabel(failed, iteration=iteration, attempt=self.state.attempt)
        self._store.append(found.tasks, found.groups, found.trajectories, redact=self.components.redact)
        return found.extra_metrics

    def draw(self, planned: IterationPlan, fresh: Collected) -> MixedBatch:
        """Reserve this iteration's rows, fresh ones first, and mix the batch."""
        store, request = self._store, planned.request
        own = self.collection.reserve(request, fresh)
        drawn = store.draw(request, self.components.sampler) if request.picks else []
        if not fresh.trajectories and not drawn:
            raise TrainingStopped(
                f"a batch must hold a trajectory, got none in iteration {request.iteration}: all rows were to be "
                f"replayed, and none of {request.count} rows could be read. They are quarantined now: run again with "
                "--resume."
            )
        estimator, penalty = self.components.estimator, self.components.collector.penalty
        batch = mix_batch(planned, fresh, [*own, *drawn], self.config, estimator=estimator, penalty=penalty)
        self.collection.end(batch)
        return batch

    def note_shortfall(self, batch: MixedBatch) -> None:
        """Say why the buffer gave fewer rows than ruled, once for each reason."""
        given, ruled = len(batch.replayed_rows), batch.planned.plan.planned_replay
        if given >= ruled or (given and _FEW_FIT in self._shortfalls):
            return
        reason = " ".join(reasons_for_empty_sources(self.components))
        if not reason:
            reason = _FEW_FIT if batch.planned.available.rows else "it has no row of an earlier iteration yet."
        if (kind := re.sub(r"\d", "", reason)) not in self._shortfalls:
            self._shortfalls.add(kind)
            command = f"agentloop replay mix {shlex.quote(str(self.components.folder.path))}"
            self._display.note(f"the buffer gave {given} of {ruled} rows: {reason} To see more: {command}")

    def update(self, iteration: int, batch: MixedBatch) -> tuple[UpdateResult, UpdateResult | None]:
        """Learn from both streams. Rows that are only observed are scored before the update and don't affect it."""
        parts, display = self.components, self._display
        display.phase("update", 0, 1)
        observes, observed = self.config.replay.mode == "observe", None
        if observes and batch.replayed_rows:
            rows = [replace(row, trajectory=as_observed(row.trajectory, parts.authors)) for row in batch.replayed_rows]
            observed = parts.trainer.score_only(rows)
        scored_by = parts.generator.policy_version if parts.scores_are_stored else None
        rows = learned_rows(batch.rows, observes=observes, scored_by=scored_by)
        result = parts.trainer.update(rows, iteration=iteration)
        display.phase("update", 1, 1)
        if result.note is not None:
            display.note(result.note)
        if result.metrics.get(RECOMPUTED):
            gap = result.metrics["actor/sampling_gap"]
            display.note(
                f"iteration {iteration}: log-probs from sampling were {gap:.2g} nats off those of the same weights, so "
                "old log-probs were recomputed. If this repeats, set compute.old_log_probs: recompute."
            )
        return result, observed

    def commit(
        self, iteration: int, batch: MixedBatch, result: UpdateResult, observed: UpdateResult | None
    ) -> dict[str, float]:
        """Store the draws with the update's statistics, the iteration and its metrics, in one transaction."""
        parts, plan = self.components, batch.planned.plan
        collected = [*batch.fresh.trajectories, *batch.fresh.unused]
        metrics = {
            **batch.fresh.metrics(),
            **environment_metrics(parts.actors.environments, collected),
            **result.metrics,
            **(observed.metrics if observed else {}),
            **batch.metrics(self.config, parts.mixer),
        }
        statistics = {**result.rows, **(observed.rows if observed else {})}
        advantages = {row.trajectory.id: row.advantage for row in batch.rows} | result.advantages
        committed = [
            replace(row.draw, advantage=advantages[row.trajectory.id], **statistics[row.trajectory.id])
            for row in batch.rows
            if row.draw is not None
        ]
        record = IterationRecord(
            run=self._run_id,
            iteration=iteration,
            policy_version=parts.generator.policy_version,
            planned_fresh=plan.planned_fresh,
            planned_replay=plan.planned_replay,
            fresh=len(batch.fresh.trajectories),
            replay=len(batch.replayed_rows),
            fraction=plan.fraction,
            optimizer_steps=result.optimizer_steps,
            metrics=metrics,
        )
        self._store.commit(record, committed, sampler_state=parts.sampler.state())
        parts.mixer.observe_iteration(success_rate=metrics.get("rollout/success"))
        self.state.iteration = iteration
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Measure held-out success, and keep it for the success target and the result."""
        began = time.perf_counter()
        result = self.collection.evaluate()
        seconds = time.perf_counter() - began
        self.pace.add_evaluation(seconds, episodes=result.tasks * result.samples)
        self.state.add_evaluation(result.success, result.tasks)
        self._keep_best()
        if self.state.iteration == 0 and (why := result.why_none_succeeded) is not None:
            self._display.note(why)
        return result.metrics() | {"time/evaluation": seconds}

    def _keep_best(self) -> None:
        """Write the present policy if it is the best one. That of the last checkpoint stays, for a resume from it."""
        best, folder = self.state.best, self.components.folder.best
        if best is None or best.iteration != self.state.iteration or self.config.checkpoint.best is None:
            return
        self._store.refuse_replaced(self._run_id)

        def fill(target: Path) -> None:
            self.components.publisher.save_model(target)
            (target / "held_out.json").write_text(json.dumps(asdict(best)))

        write_directory(folder / self.state.best_name, fill)
        keep_only(folder, [self._saved_best, self.state.best_name])

    def save(self) -> None:
        """Write a full checkpoint of this iteration, unless there is one."""
        if self._saved == self.state.iteration:
            return
        parts, folder = self.components, self.components.folder
        self._store.refuse_replaced(self._run_id)
        self._display.phase("checkpoint", 0, 1)
        state = {
            "run": self._run_id,
            "loop": asdict(self.state),
            "sampler": parts.sampler.state(),
            "mixer": parts.mixer.state(),
            "source": parts.source.state(),
        }
        checkpoint = folder.checkpoints / f"{self.state.iteration:06d}"
        save_checkpoint(checkpoint, parts.publisher.save_model, parts.trainer.save, state)
        folder.name_model(checkpoint)
        oldest = complete_checkpoints(folder.checkpoints)[-self.config.checkpoint.keep :][0]
        # No resume goes back before the oldest checkpoint, so rows evicted up to it are not needed again. The purge is
        # refused where another process has taken over the run: it may have begun from a checkpoint removed below.
        self._store.purge(self._run_id, int(oldest.name))
        prune(folder.checkpoints, keep=self.config.checkpoint.keep)
        self._saved_best = self.state.best_name
        keep_only(folder.best, [self._saved_best])
        self._display.phase("checkpoint", 1, 1)
        self._saved = self.state.iteration

    def _stop_at_corruption(self, iteration: int, *, rows: float, corrupt: float) -> None:
        """Stop the run where many rows are corrupt. Few are replaced by other draws; many are a sign of a bad disk."""
        limit = self.config.replay.max_quarantined
        if corrupt > max(_FEW_CORRUPT, limit * rows):
            raise TrainingStopped(
                f"rows quarantined as corrupt must be at most replay.max_quarantined={limit:g} of the buffer, got "
                f"{corrupt:g} of {rows:g} after iteration {iteration} at {self._store.url}. "
                "Look for a failing disk, and remove them before --resume: "
                "agentloop replay prune --where \"state == 'quarantined'\" --yes"
            )
