"""The interface for collecting: a plan, its fresh rows, and their slots in the batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.evaluation import Evaluation, held_out_episode
from agentloop.rollouts.trajectories import Collected, task_record
from agentloop.training.components import Components
from agentloop.training.loop_state import LoopState
from agentloop.training.mixed_batch import IterationPlan, MixedBatch
from replay.mixing.batch_plan import BatchPlan
from replay.mixing.request import Availability, DrawRequest
from replay.records import BatchRow
from replay.storage.write import AppendReport


class StoppedWaiting(Exception):
    """The run was asked to stop while episodes were under way. Their update has not begun."""


class BatchForgotten(Exception):
    """All rows of a workers' batch were forgotten. The iteration is planned again, with the next batch."""


class Collection(ABC):
    """Collects the fresh rows of a run."""

    def __init__(self, components: Components, state: LoopState) -> None:
        self._components = components
        self._state = state
        self._store, self._run = components.store, components.run_id

    @abstractmethod
    def plan(self, iteration: int) -> IterationPlan:
        """Plan the batch, given the rows that the buffer has."""

    @abstractmethod
    def collect(self, planned: IterationPlan) -> Collected:
        """Collect the plan's fresh rows, in groups, with advantages. Raises StoppedWaiting or BatchForgotten."""

    @abstractmethod
    def append(self, fresh: Collected) -> AppendReport:
        """Store the fresh rows, all of them or none."""

    @abstractmethod
    def reserve(self, request: DrawRequest, fresh: Collected) -> list[BatchRow]:
        """Reserve the first slots of the iteration's batch for the fresh rows."""

    @abstractmethod
    def end(self, batch: MixedBatch) -> None:
        """Note that the batch is whole, and its tasks have had their turn."""

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """Evaluate the present policy on held-out tasks."""

    def end_run(self) -> None:
        """Mark the run as ended."""
        self._store.roles.end_run(self._run)

    def _request(self, iteration: int) -> tuple[DrawRequest, Availability]:
        """The iteration's request to the buffer, and the rows that the buffer has for it."""
        parts = self._components
        limits = parts.config.replay.limits.model_copy(update={"max_tokens": parts.config.context.max_tokens})
        request = DrawRequest(self._run, iteration, parts.generator.policy_version, limits=limits)
        replays = parts.mixer.rule.highest_fraction > 0
        return request, self._store.available(request, parts.sampler) if replays else Availability()

    def _tasks_without_member(self, batch: MixedBatch) -> list[int]:
        return batch.without_member(lambda index: task_hash(self._components, index))


def task_hash(components: Components, index: int) -> str:
    """The hash of the training task at an index."""
    return components.actors.environments.task_hash(components.source.train(index))


def plan_batch(
    components: Components, state: LoopState, iteration: int, available: Availability
) -> tuple[BatchPlan, tuple[int, ...]]:
    """The mixer's plan of a batch, and its tasks."""
    mixer, queue = components.mixer, state.tasks
    upcoming = [task_hash(components, index) for index in queue.upcoming(mixer.num_tasks)]
    plan = mixer.plan(iteration=iteration, available=available, tasks=upcoming)
    return plan, tuple(queue.upcoming(plan.num_tasks))


def keep_episodes(components: Components, iteration: int, episodes: Sequence[tuple[int, Episode]]) -> None:
    """Store an evaluation's episodes, redacted, apart from rows that are drawn. Only the newest evaluations stay."""
    config, redact, run = components.config, components.redact, components.run_id
    kept, tasks = [], []
    for number, episode in episodes if config.evaluation.keep_episodes else ():
        record = held_out_episode(components.actors, episode, config, run=run, iteration=iteration, number=number)
        if redact is not None:
            record = replace(record, messages=tuple(redact(record.messages) or ()))
        kept.append(record)
        tasks.append(task_record(components.actors.environments.factory_for(episode.task), episode.task))
    components.store.append(tasks, [], [])
    components.store.keep_held_out(run, kept, evaluations=config.evaluation.keep_episodes)
