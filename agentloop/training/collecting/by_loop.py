"""Collection by the loop, which runs the episodes of a batch itself before it learns from them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from agentloop.config.seeds import derive_seed
from agentloop.environments import Task
from agentloop.environments.tools.tool_memory import ToolMemory
from agentloop.rollouts.dynamic_sampling import sample_dynamically
from agentloop.rollouts.evaluation import Evaluation, evaluate
from agentloop.rollouts.trajectories import Collected, CollectedBy
from agentloop.training.collecting.collection import Collection, keep_episodes, plan_batch
from agentloop.training.components import Components
from agentloop.training.loop_state import LoopState
from agentloop.training.mixed_batch import IterationPlan, MixedBatch
from replay.mixing.request import DrawRequest
from replay.records import BatchRow
from replay.storage.write import AppendReport


class LoopCollection(Collection):
    """Collects episodes of the current policy, one batch after another."""

    def __init__(self, components: Components, state: LoopState) -> None:
        super().__init__(components, state)
        memory = components.actors.memory
        held_out = None if memory is None else ToolMemory(*memory.environments)
        self._evaluating = replace(components.actors, memory=held_out)

    def plan(self, iteration: int) -> IterationPlan:
        request, available = self._request(iteration)
        plan, tasks = plan_batch(self._components, self._state, iteration, available)
        return IterationPlan(plan, tasks, available, replace(request, picks=plan.picks, first_slot=plan.fresh))

    def collect(self, planned: IterationPlan) -> Collected:
        iteration, source = planned.request.iteration, self._components.source
        groups = [(source.train(planned.tasks[slot]), size) for slot, size in planned.plan.groups]
        first = self._collect_round(iteration, groups, ())
        rounds = self._components.config.rollout.dynamic_sampling_rounds
        if rounds == 0:
            return first

        def further(sizes: Sequence[int], earlier: Sequence[Collected]) -> Collected:
            had = len(planned.tasks) + sum(len(round.further_tasks) for round in earlier)
            tasks = self._state.tasks.upcoming(had + len(sizes))[had:]
            newer = self._collect_round(iteration, list(zip(map(source.train, tasks), sizes, strict=True)), earlier)
            return replace(newer, further_tasks=tuple(tasks))

        return sample_dynamically(first, further, rounds=rounds)

    def _collect_round(
        self, iteration: int, groups: Sequence[tuple[Task, int]], earlier: Sequence[Collected]
    ) -> Collected:
        parts, config = self._components, self._components.config
        # The first round's seed is the same with and without further rounds.
        seed = derive_seed(config.run.seed, "collect", iteration, *([len(earlier)] if earlier else []))
        parts.generator.begin(seed=seed, temperature=config.rollout.temperature)
        self._recall([parts.actors.environments.task_hash(task) for task, _ in groups])
        return parts.collector.collect(
            groups,
            CollectedBy(parts.run_id, iteration, self._state.attempt),
            earlier=earlier,
            progress=partial(parts.display.phase, "collect"),
        )

    def _recall(self, tasks: Sequence[str]) -> None:
        """Load the tool results of earlier iterations for these tasks."""
        memory = self._components.actors.memory
        if memory is not None:
            memory.keep(tasks)
            for environment in memory.environments:
                memory.add(self._store.remembered(environment, tasks))

    def append(self, fresh: Collected) -> AppendReport:
        store, memory = self._store, self._components.actors.memory
        groups, rows = [*fresh.groups, *fresh.unused_groups], [*fresh.trajectories, *fresh.unused]
        report = store.append(fresh.tasks, groups, rows, redact=self._components.redact)
        if memory is not None:
            stored = {task.hash for task in fresh.tasks}
            store.remember([answered for answered in memory.take_new() if answered.task in stored])
        return report

    def reserve(self, request: DrawRequest, fresh: Collected) -> list[BatchRow]:
        rows = [replace(row, reward=fresh.rewards[row.trajectory.id]) for row in request.fresh_rows(fresh.trajectories)]
        self._store.reserve_fresh([row.draw for row in rows if row.draw is not None])
        return rows

    def end(self, batch: MixedBatch) -> None:
        names = [part.name for part in self._components.config.parts]
        rows = [*batch.fresh.trajectories, *batch.fresh.unused]
        self._state.tasks.advance(
            batch.tasks,
            without_member=self._tasks_without_member(batch),
            collected=lambda _: Counter(names.index(row.record.environment) for row in rows),
        )

    def evaluate(self) -> Evaluation:
        parts, scorer = self._components, self._components.collector.scorer
        progress = partial(parts.display.phase, "evaluate")
        found = evaluate(self._evaluating, parts.source, parts.config, scorer=scorer, progress=progress)
        keep_episodes(parts, self._state.iteration, found.episodes)
        return replace(found, episodes=())
