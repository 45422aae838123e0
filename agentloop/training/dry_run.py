"""The batches a configuration would compose, without acting or learning: the mixer on a buffer, real or made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from agentloop.config import RunConfig
from agentloop.config.seeds import derive_seed
from agentloop.environments import open_tasks
from agentloop.errors import UserError
from agentloop.training.plan import TaskQueue, draw_request, plan_iteration
from agentloop.user_code import load_sampler
from replay.locate import place
from replay.mixing.apportion import Remainders
from replay.mixing.mixer import BatchPlan, Mixer
from replay.mixing.request import Availability
from replay.store import ReplayStore

_SELF = "self"
_Name = TypeVar("_Name")


@dataclass
class DryRun:
    """Where a run stands, and what it has in its buffer."""

    config: RunConfig
    mixer: Mixer
    tasks: TaskQueue
    available: Availability
    task_hash: Callable[[int], str]
    iteration: int = 0
    """Iterations behind it."""
    same_rule: bool = True
    """Whether the run it goes on from declares the same composition; else no remainders are taken over from it."""

    @classmethod
    def from_nothing(cls, config: RunConfig) -> DryRun:
        """Before the first iteration, with an empty buffer."""
        mixer = Mixer(config.mix_rule())
        return cls(config, mixer, TaskQueue(), Availability(), _task_hashes(config, mixer))

    @classmethod
    def from_run(cls, config: RunConfig, path: Path) -> DryRun:
        """After a run's last checkpoint, with its buffer, which is only read."""
        # Both bring torch, which a dry run without a run starts faster without.
        from agentloop.runs.checkpoint import complete_checkpoints, load_checkpoint
        from agentloop.runs.run_folder import open_run_folder

        folder = open_run_folder(path)
        begun = cls.from_nothing(config)
        complete = complete_checkpoints(folder.checkpoints)
        if complete:
            values = load_checkpoint(complete[-1]).values
            begun.iteration = values["loop"]["iteration"]
            begun.tasks = TaskQueue.from_values(values["loop"]["tasks"])
            if (folder.config.tasks, folder.config.environment) == (config.tasks, config.environment):
                begun.task_hash = _task_hashes(config, begun.mixer, values["source"], folder.environments)
            begun.same_rule = folder.config.mix_rule() == config.mix_rule()
            if begun.same_rule:
                begun.mixer.load_state(values["mixer"])
        request = draw_request(config, run=folder.run_id, iteration=begun.iteration + 1, policy_version=begun.iteration)
        location, _, _ = place(str(path))
        with closing(ReplayStore.open(location, read_only=True)) as store:
            sampler = load_sampler(
                config.replay.sampler, derive_seed(config.run.seed, "sampler"), config.replay.sampler_options
            )
            begun.available = store.available(request, sampler)
        return begun

    def plans(self, count: int, *, success: float) -> Iterator[tuple[int, BatchPlan]]:
        """(iteration, plan) of the next `count` iterations, at most those the run has left. Raises ReplayStarved.

        What the iterations between would collect is made up: a `success` share of each fresh group succeeds, and
        those rows (all of them without `replay.successful_only`) can be drawn from the next iteration on. Rows never
        grow too old or wear out, and their effective sample size stays above the controller's floor.
        """
        left = self.config.run.iterations - self.iteration
        if left < 1:
            raise UserError(
                f"run.iterations must be above what the run has behind it ({self.iteration}), got "
                f"{self.config.run.iterations}. Set it with --set run.iterations={self.iteration + count}."
            )
        successes = Remainders()
        for _ in range(min(count, left)):
            self.iteration += 1
            plan, tasks = plan_iteration(
                self.mixer,
                self.config,
                self.tasks,
                iteration=self.iteration,
                available=self.available,
                task_hash=self.task_hash,
            )
            yield self.iteration, plan
            self.tasks.advance(tasks)
            self._store(plan, tasks, successes, success)
            self.mixer.feed(success_rate=success if plan.fresh else None, ess_by_age={})

    def _store(self, plan: BatchPlan, tasks: tuple[int, ...], successes: Remainders, success: float) -> None:
        """The plan's fresh groups, as they are made up, into the buffer."""
        replay, stored = self.config.replay, self.available
        if replay.sources and _SELF not in replay.sources:
            return
        by_task, groups = Counter[str](), Counter[int]()
        for slot, size in plan.groups:
            _, rows = successes.split("success", size, [1 - Fraction(success), Fraction(success)])
            rows = rows if replay.successful_only else size
            by_task[self.task_hash(tasks[slot])] += min(rows, replay.per_group or rows)
            groups[size] += rows == size
        own = Counter({(_SELF, task): rows for task, rows in by_task.items()})
        all_of_task = _capped(by_task + Counter(stored.by_task), replay.per_task)
        of_source = _capped(own + Counter(stored.by_source_task), replay.per_task)
        self.available = replace(
            stored,
            rows=sum(all_of_task.values()),
            by_source={**stored.by_source, _SELF: sum(n for (source, _), n in of_source.items() if source == _SELF)},
            by_task=all_of_task,
            by_source_task=of_source,
            groups=groups + Counter(stored.groups),
            by_source_groups=Counter({(_SELF, size): count for size, count in groups.items()})
            + Counter(stored.by_source_groups),
        )


def _capped(counts: Counter[_Name], most: int | None) -> dict[_Name, int]:
    return {name: count if most is None else min(count, most) for name, count in counts.items()}


def _task_hashes(
    config: RunConfig, mixer: Mixer, state: Mapping[str, Any] | None = None, sources: Sequence[str] = ()
) -> Callable[[int], str]:
    """The hash of each training task of the run; its index where nothing asks for more, which needs no environment.

    `state` is that of the run's own source of tasks; None: that of a run that has not begun. `sources` are those of
    the run's environment, see `open_tasks`.
    """
    if not mixer.num_tasks and config.replay.per_task is None:
        return str
    factory, source = open_tasks(config, sources, environment_changed=True)
    if state is not None:
        source.load_state(state)
    return lambda index: factory.task_hash(source.train(index))
