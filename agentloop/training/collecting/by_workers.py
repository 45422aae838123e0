"""Workers run the episodes: the learner issues tickets for batches ahead, and learns from each batch that is whole."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from agentloop.errors import TrainingStopped
from agentloop.records import KlPenalty, kl_penalties, penalised_rewards
from agentloop.rollouts.evaluation import Evaluation
from agentloop.rollouts.trajectories import Collected
from agentloop.training.collecting.collection import replay_request, task_hash
from agentloop.training.collecting.held_out import evaluate_by_workers
from agentloop.training.collecting.issued_batches import IssuedBatches
from agentloop.training.collecting.waiting import Waiting
from agentloop.training.components import Components
from agentloop.training.loop_state import LoopState
from agentloop.training.mixed_batch import IterationPlan, MixedBatch
from replay.mixing.request import Availability, DrawRequest
from replay.records import BatchRow, Trajectory, group_of
from replay.sampling.staleness import may_be_fresh
from replay.storage.collecting.fresh_groups import FreshDraw, FreshRequest
from replay.storage.write import AppendReport
from replay.ticket_records import EVALUATION, TRAIN, EndedGroup


class WorkerCollection:
    """Each batch is planned when its tickets are issued, and learned from when all of them have ended.

    `collection.max_staleness` K is kept by what is issued: at most K batches beyond the one that is learned from, and
    each is learned from in its turn. So a batch waits for its slowest episode, and no row is too old to be fresh but
    those that updates in between, from replay alone, have made so.
    """

    def __init__(self, components: Components, state: LoopState, *, stopped: Callable[[], bool]) -> None:
        self._components = components
        self._state = state
        self._waiting = Waiting(components, stopped=stopped)
        self._store, self._run = components.store, components.run_id
        self._section = components.config.collection
        self._batches = IssuedBatches(components, state)
        self._store.tickets.revoke(self._run, EVALUATION, "its evaluation did not end")
        while self._store.tickets.has_failed(self._run, state.batches + 1):
            # A learner stopped at it, and would again: its tasks come once more, what failed them may be mended.
            self._go_on_to_next(self._batches[state.batches + 1].tasks)
        self._penalties: dict[str, KlPenalty] = {}
        """Of the rows of the batch that was collected last."""
        self._rows: list[BatchRow] = []

    def plan(self, iteration: int) -> IterationPlan:
        """Issue what may be collected from now on, and plan this iteration with the batch whose turn it is."""
        request, available = replay_request(self._components, iteration)
        turn = self._next_turn(request)
        self._batches.issue(turn + self._ahead, request.policy_version, available)
        alone = self._replayed_meanwhile(turn, request, available)
        if alone is not None:
            return alone
        plan, tasks = self._batches[turn].plan, self._batches[turn].tasks
        return IterationPlan(plan, tasks, available, replace(request, picks=plan.picks, first_slot=plan.fresh))

    def _next_turn(self, request: DrawRequest) -> int:
        """The number of the batch that is learned from next.

        Updates of replay alone that a resume took back may have left a batch too far ahead of the policy: all of it is
        late, and the next one has its turn.
        """
        while (turn := self._state.batches + 1) <= self._batches.last:
            is_ahead = self._batches[turn].version > request.policy_version
            if not is_ahead or self._store.tickets.under_way(self._run, turn):
                break
            _, drawn = self._take(turn, request)
            if drawn.rows or not drawn.late:
                break
            self._go_on_to_next(())
        return turn

    @property
    def _ahead(self) -> int:
        """Batches issued beyond the one whose turn it is. What the bound leaves is for updates in between."""
        most = self._section.max_staleness
        return most if self._section.samples_per_insert is None else min(1, most - 1)

    def _replayed_meanwhile(self, turn: int, request: DrawRequest, available: Availability) -> IterationPlan | None:
        """An iteration of replay alone, where the batch is not whole yet and the configuration allows one.

        Every batch that was issued is still to have its iteration.
        """
        ratio = self._section.samples_per_insert
        if ratio is None or not self._store.tickets.under_way(self._run, turn):
            return None
        age_then = [
            request.policy_version + 1 + number - turn - self._batches[number].version
            for number in self._under_way(turn)
        ]
        left = self._components.config.run.iterations - self._state.iteration
        if not may_be_fresh(age_then, self._section.max_staleness) or len(age_then) >= left:
            return None
        learned, collected = self._store.tickets.uses(self._run)
        if learned + self._components.config.batch.trajectories > ratio * collected:
            return None
        plan = self._components.mixer.plan_replay_alone(request.iteration, available)
        return None if plan is None else IterationPlan(plan, (), available, replace(request, picks=plan.picks))

    def _under_way(self, turn: int) -> range:
        return range(turn, self._batches.last + 1)

    def collect(self, planned: IterationPlan) -> Collected:
        """Wait for the batch, give its rows their advantages, and take them. Raises StoppedWaiting."""
        self._rows, self._penalties = [], {}
        if not planned.plan.groups:
            return Collected()
        turn = self._state.batches + 1
        episodes = self._waiting.until_ended(turn)
        groups, drawn = self._take(turn, planned.request)
        if not drawn.rows:
            raise TrainingStopped(
                f"batch {turn} must have a trajectory that was collected, got none of {episodes} episodes: "
                f"{_reason(groups)}. Mend that and --resume."
            )
        self._rows = drawn.rows
        return self._collected(drawn.rows, late=drawn.late, failed=episodes - len(drawn.rows) - drawn.late)

    def _take(self, turn: int, request: DrawRequest) -> tuple[list[EndedGroup], FreshDraw]:
        """The groups of a batch that were not closed before, and those of its rows that are fresh now."""
        groups = [group for group in self._store.tickets.ended_groups(self._run) if group.iteration == turn]
        self._close(groups, request.policy_version)
        bound = self._section.max_staleness
        wanted = FreshRequest(self._run, request.iteration, turn, request.policy_version, bound)
        return groups, self._store.tickets.draw_fresh(wanted)

    def _close(self, groups: list[EndedGroup], version: int) -> None:
        """The advantages of the whole batch at once, as some compare all of it; then its rows wait to be fresh."""
        numbers = [group.number for group in groups]
        rows = self._store.tickets.open_rows(self._run, numbers)
        rewards = penalised_rewards(rows, self._charged(rows))
        found = self._components.estimator.of_groups(rows, rewards)
        advantages = {row.id: advantage for row, advantage in zip(rows, found, strict=True)}
        self._store.tickets.close_groups(self._run, numbers, advantages, policy_version=version)

    def _charged(self, rows: list[Trajectory]) -> list[KlPenalty]:
        """Today's penalty of each row, measured once."""
        missing = [row for row in rows if row.id not in self._penalties]
        found = kl_penalties(self._components.collector.penalty, missing)
        self._penalties |= {row.id: penalty for row, penalty in zip(missing, found, strict=True)}
        return [self._penalties[row.id] for row in rows]

    def _collected(self, drawn: list[BatchRow], *, late: int, failed: int) -> Collected:
        rows = [row.trajectory for row in drawn]
        charged = self._charged(rows)
        groups: dict[str, list[Trajectory]] = {}
        for row in rows:
            groups.setdefault(row.record.group, []).append(row)
        staleness = [row.draw.staleness or 0 for row in drawn if row.draw is not None]
        return Collected(
            groups=[group_of(members) for members in groups.values()],
            trajectories=rows,
            engine_failures=failed,
            rewards={row.id: reward for row, reward in zip(rows, penalised_rewards(rows, charged), strict=True)},
            kl_penalties={row.id: penalty for row, penalty in zip(rows, charged, strict=True)},
            extra_metrics={
                "collection/staleness_mean": sum(staleness) / len(staleness),
                "collection/staleness_max": max(staleness),
                "collection/late": late,
            },
        )

    def append(self, fresh: Collected) -> AppendReport:
        """Workers have stored them."""
        return AppendReport(inserted=0, duplicates=len(fresh.trajectories), clipped=0)

    def reserve(self, request: DrawRequest, fresh: Collected) -> list[BatchRow]:
        """They were reserved when they were taken."""
        return [replace(row, reward=fresh.rewards[row.trajectory.id]) for row in self._rows]

    def end(self, batch: MixedBatch) -> None:
        if not batch.planned.plan.groups:
            return
        self._go_on_to_next(batch.without_member(lambda index: task_hash(self._components, index)))

    def _go_on_to_next(self, without_member: Collection[int]) -> None:
        """The batch has had its turn. Tasks without a member in it come once more, and not for ever: in the end batches
        would be of those tasks alone that always fail."""
        self._state.batches += 1
        if without_member:
            planned = self._store.tickets.planned(self._run, after=0)
            others = (batch.plan["tasks"] for batch in planned if batch.iteration != self._state.batches)
            again = set(without_member).difference(*others)
            self._state.tasks.pending = [*sorted(again), *self._state.tasks.pending]

    def evaluate(self) -> Evaluation:
        """Workers do; the policy is not published anew meanwhile."""
        return evaluate_by_workers(self._components, self._waiting, self._state.iteration)

    def end_run(self) -> None:
        """What is still under way is wanted no more, and everybody leaves."""
        self._store.tickets.revoke(self._run, TRAIN, "the run has ended")
        self._store.roles.end_run(self._run)


def _reason(groups: list[EndedGroup]) -> str:
    """Why the first member that failed did."""
    return next((m.reason for group in groups for m in group.members if m.reason is not None), "all of them are late")
