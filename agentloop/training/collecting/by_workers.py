"""Collection by workers: the learner issues tickets for batches, and learns from each batch when it is whole."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from agentloop.environments import Task
from agentloop.errors import TrainingStopped
from agentloop.records import KlPenalty, kl_penalties, penalised_rewards
from agentloop.rollouts.evaluation import Attempts, Evaluation, Outcome
from agentloop.rollouts.trajectories import Collected, task_record
from agentloop.training.collecting.collection import (
    BatchForgotten,
    Collection,
    StoppedWaiting,
    keep_episodes,
    plan_batch,
)
from agentloop.training.components import Components
from agentloop.training.loop_state import LoopState
from agentloop.training.mixed_batch import IterationPlan, MixedBatch
from replay.mixing.batch_plan import BatchPlan
from replay.mixing.request import Availability, DrawRequest
from replay.records import FORGOTTEN, OPEN_GROUP, WAITING, BatchRow, StopReason, Trajectory, group_of
from replay.storage.collecting.fresh_groups import FreshRequest
from replay.storage.collecting.ticket_records import (
    EVALUATION,
    TRAIN,
    UNENDED,
    EndedGroup,
    PlannedBatch,
    Purpose,
    TicketRecord,
)
from replay.storage.write import AppendReport

_PLANS = TypeAdapter(BatchPlan)
_LOOK_AGAIN_S = 0.1
_NOBODY_S = 30.0
"""Seconds without any worker after which a message says how to start one."""


class WorkerCollection(Collection):
    """Plans each batch when its tickets are issued, and collects it when all of them have ended.

    At most `collection.max_staleness` batches are issued beyond the next one, so their rows stay fresh.
    """

    def __init__(self, components: Components, state: LoopState, *, stopped: Callable[[], bool]) -> None:
        super().__init__(components, state)
        self._stopped = stopped
        self._section = components.config.collection
        self._batches: dict[int, tuple[BatchPlan, tuple[int, ...]]] = {}
        """The plan of each issued batch that is not learned from yet, and the index of the task of each slot."""
        self._load_batches()
        self._store.tickets.revoke(self._run, EVALUATION, "its evaluation did not end")
        to_come = {*UNENDED, OPEN_GROUP, WAITING}
        while (ends := self._store.tickets.ends(self._run, state.batches + 1)) and ends.isdisjoint(to_come):
            # The learner stopped at this batch, and would stop again. Its tasks come again; their fault may be mended.
            _, tasks = self._batches[state.batches + 1]
            self._go_on_to_next(tasks)
        self._penalties: dict[str, KlPenalty] = {}
        """KL penalties by id, for rows of the batch that was collected last."""
        self._rows: list[BatchRow] = []

    def _load_batches(self) -> None:
        """Load the batches that were issued before a crash; their tickets and rows are stored."""
        mixer = self._components.mixer
        for found in self._store.tickets.planned(self._run, after=self._state.batches):
            values: dict[str, Any] = dict(found.plan)
            self._add(found.iteration, _PLANS.validate_python(values["plan"]), tuple(values["tasks"]))
            # This a mixer learns from iterations. The other parts of its state follow from its plans.
            learned = {"success_reached": mixer.success_reached}
            mixer.load_state({**values["mixer"], **learned})

    def _add(self, number: int, plan: BatchPlan, tasks: tuple[int, ...]) -> None:
        self._batches[number] = (plan, tasks)
        self._state.tasks.advance(tasks, collected=lambda turns: turns.planned(tasks, plan.groups))

    def issue(self, last: int, version: int, available: Availability) -> None:
        """Plan and issue the missing batches up to `last`, or to the end of the run."""
        # A batch that failed or was forgotten made no iteration.
        parts, lost = self._components, self._state.batches - self._state.iteration
        newest = max(self._batches, default=self._state.batches)  # it may be learned from already
        for number in range(newest + 1, min(last, parts.config.run.iterations + lost) + 1):
            plan, tasks = plan_batch(parts, self._state, number - lost, available)
            self._add(number, plan, tasks)
            values = {"tasks": list(tasks), "version": version, "mixer": parts.mixer.state()}
            values["plan"] = _PLANS.dump_python(plan, mode="json")
            groups = [(parts.source.train(tasks[slot]), size) for slot, size in plan.groups]
            self.issue_groups(groups, number, TRAIN, PlannedBatch(self._run, number, values))

    def issue_groups(
        self, groups: Sequence[tuple[Task, int]], iteration: int, purpose: Purpose, plan: PlannedBatch | None = None
    ) -> range:
        """Issue (task, size) groups, whose episodes workers may then run. Returns the groups' numbers, in order."""
        tickets, environments = self._store.tickets, self._components.actors.environments
        last = tickets.last_number(self._run)
        first = 0 if last is None else last + 1
        numbers = range(first, first + len(groups))
        tasks, records = {}, []
        for number, (task, size) in zip(numbers, groups, strict=True):
            hash = environments.task_hash(task)
            tasks[hash] = task_record(environments.factory_for(task), task)
            records += [TicketRecord(self._run, number, member, hash, iteration, purpose) for member in range(size)]
        tickets.issue(list(tasks.values()), records, plan)
        return numbers

    def plan(self, iteration: int) -> IterationPlan:
        """Issue the batches that may be collected, and plan this iteration with the next one."""
        request, available = self._request(iteration)
        turn = self._state.batches + 1
        self.issue(turn + self._section.max_staleness, request.policy_version, available)
        plan, tasks = self._batches[turn]
        return IterationPlan(plan, tasks, available, replace(request, picks=plan.picks, first_slot=plan.fresh))

    def collect(self, planned: IterationPlan) -> Collected:
        """Wait for the batch, compute its advantages, and draw its rows."""
        self._rows, self._penalties = [], {}
        if not planned.plan.groups:  # all of it is replayed
            return Collected()
        turn = self._state.batches + 1
        episodes = self._wait_until_ended(turn)
        groups = [group for group in self._store.tickets.ended_groups(self._run) if group.iteration == turn]
        request, bound = planned.request, self._section.max_staleness
        self._close_groups(groups, request.policy_version)
        wanted = FreshRequest(self._run, request.iteration, turn, request.policy_version, bound)
        drawn = self._store.tickets.draw_fresh(wanted)
        if not drawn.rows and self._store.tickets.ends(self._run, turn) == {FORGOTTEN}:
            self._go_on_to_next(planned.tasks)
            self._components.display.note(f"batch {turn} was forgotten before its update: its tasks come again")
            raise BatchForgotten
        reasons = [member.reason for group in groups for member in group.members if member.reason is not None]
        if not drawn.rows:
            raise TrainingStopped(
                f"batch {turn} must have a trajectory that was collected, got none of {episodes} episodes: "
                f"{next(iter(reasons), 'all are late or damaged')}. Mend that and --resume."
            )
        self._rows = drawn.rows
        not_judged = sum(reason.startswith(f"{StopReason.NOT_JUDGED}: ") for reason in reasons)
        failed = episodes - len(drawn.rows) - drawn.late - not_judged
        return self._describe_collected(drawn.rows, late=drawn.late, failed=failed, not_judged=not_judged)

    def _close_groups(self, groups: list[EndedGroup], version: int) -> None:
        """Store the advantages of whole groups, computed together because some algorithms compare the whole batch."""
        numbers = [group.number for group in groups]
        rows = self._store.tickets.open_rows(self._run, numbers)
        rewards = penalised_rewards(rows, self._measure_penalties(rows))
        found = [row.record for row in self._components.estimator.advantages_for_groups(rows, rewards)]
        advantages = {record.id: (record.advantage, record.agent_rewards) for record in found}
        self._store.tickets.close_groups(self._run, numbers, advantages, policy_version=version)

    def _measure_penalties(self, rows: list[Trajectory]) -> list[KlPenalty]:
        """The present policy's KL penalty of each row, measured once per batch."""
        missing = [row for row in rows if row.id not in self._penalties]
        found = kl_penalties(self._components.collector.penalty, missing)
        self._penalties |= {row.id: penalty for row, penalty in zip(missing, found, strict=True)}
        return [self._penalties[row.id] for row in rows]

    def _describe_collected(self, drawn: list[BatchRow], *, late: int, failed: int, not_judged: int) -> Collected:
        rows = [row.trajectory for row in drawn]
        charged = self._measure_penalties(rows)
        groups: dict[str, list[Trajectory]] = {}
        for row in rows:
            groups.setdefault(row.record.group, []).append(row)
        staleness = [row.draw.staleness or 0 for row in drawn if row.draw is not None]
        return Collected(
            groups=[group_of(members) for members in groups.values()],
            trajectories=rows,
            engine_failures=failed,
            not_judged=not_judged,
            rewards={row.id: reward for row, reward in zip(rows, penalised_rewards(rows, charged), strict=True)},
            kl_penalties={row.id: penalty for row, penalty in zip(rows, charged, strict=True)},
            extra_metrics={
                "collection/staleness_mean": sum(staleness) / len(staleness),
                "collection/staleness_max": max(staleness),
                "collection/late": late,
            },
        )

    def append(self, fresh: Collected) -> AppendReport:
        """Report rows that workers have stored already."""
        return AppendReport(inserted=0, duplicates=len(fresh.trajectories))

    def reserve(self, request: DrawRequest, fresh: Collected) -> list[BatchRow]:
        """The rows, which were reserved when they were drawn."""
        return [replace(row, reward=fresh.rewards[row.trajectory.id]) for row in self._rows]

    def end(self, batch: MixedBatch) -> None:
        self._go_on_to_next(self._tasks_without_member(batch))

    def _go_on_to_next(self, without_member: Iterable[int]) -> None:
        """End a batch's turn. Its tasks without a member come again, once.

        If they came again for ever, batches would in the end hold only tasks that always fail.
        """
        self._state.batches += 1
        again = set(without_member)
        if again:
            planned = self._store.tickets.planned(self._run, after=0)
            again.difference_update(*(b.plan["tasks"] for b in planned if b.iteration != self._state.batches))
            self._state.tasks.pending = [*sorted(again), *self._state.tasks.pending]

    def evaluate(self) -> Evaluation:
        """Have workers run `evaluation.samples` episodes on each held-out task, before other episodes."""
        parts, section, tickets = self._components, self._components.config.evaluation, self._store.tickets
        tasks, iteration = parts.source.held_out(section.tasks), self._state.iteration
        numbers = self.issue_groups([(task, section.samples) for task in tasks], iteration, EVALUATION)
        self._wait_until_ended(iteration, EVALUATION)
        attempts, lost, groups = [], 0, tickets.ended_groups(self._run, EVALUATION)
        ended = [group.number for group in groups]
        tickets.close_groups(self._run, ended, {}, policy_version=parts.generator.policy_version)
        for group in groups:
            outcomes = tuple(Outcome(**member.outcome) for member in group.members if member.outcome is not None)
            if group.number in numbers:
                lost += len(group.members) - len(outcomes)
                environment = tasks[group.number - numbers.start].environment
                attempts += [Attempts(outcomes, environment)] if outcomes else []
        keep_episodes(parts, iteration, ())  # the workers have stored them
        return Evaluation(tuple(attempts), section.samples, lost, bool(parts.actors.environments.tools))

    def _wait_until_ended(self, iteration: int, purpose: Purpose = TRAIN) -> int:
        """Wait until all episodes have ended, and return their number. Raises StoppedWaiting for training episodes."""
        parts, tickets = self._components, self._store.tickets
        phase = "collect" if purpose == TRAIN else "evaluate"
        shown_at, episodes = time.monotonic(), tickets.episodes(self._run, iteration, purpose)
        while under_way := tickets.under_way(self._run, iteration, purpose):
            parts.display.phase(phase, episodes - under_way, episodes)
            # An evaluation belongs to an iteration that is learned from already, so it is always finished.
            if purpose == TRAIN and self._stopped():
                raise StoppedWaiting
            if time.monotonic() - shown_at > _NOBODY_S:
                shown_at = time.monotonic()
                listed = self._store.roles.listed("worker", self._run)
                if all(worker.is_gone(self._section.lease_s) for worker in listed):
                    parts.display.note(f"waiting for a worker: agentloop worker --run {parts.folder.path}")
                    shown_at = math.inf
            time.sleep(_LOOK_AGAIN_S)
        return episodes

    def end_run(self) -> None:
        """Revoke the remaining tickets and end the run, so that workers leave."""
        self._store.tickets.revoke(self._run, TRAIN, "the run has ended")
        super().end_run()
