"""The tasks of several environments: their numbers go round among them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from agentloop.environments.environment import Task
from agentloop.environments.task_source import GroupResult, TaskSource


class SeveralSources(TaskSource):
    """Stands where one source does: task `number` is the (number // n)-th one of the (number % n)-th of n sources."""

    def __init__(self, sources: Mapping[str, TaskSource]) -> None:
        self._names = list(sources)
        self._sources = list(sources.values())

    @property
    def summary(self) -> str | None:
        found = {name: source.summary for name, source in zip(self._names, self._sources, strict=True)}
        texts = [f"{name}: {summary}" for name, summary in found.items() if summary is not None]
        return "; ".join(texts) or None

    def train(self, index: int) -> Task:
        number, turn = divmod(index, len(self._sources))
        return self._sources[turn].train(number)

    def held_out(self, count: int) -> list[Task]:
        """One of each in turn; those that have no more are left out."""
        each = [source.held_out(count) for source in self._sources]
        rounds = itertools.chain.from_iterable(itertools.zip_longest(*each))
        return [task for task in rounds if task is not None][:count]

    def record_success(self, done: Sequence[int], groups: Sequence[GroupResult]) -> None:
        for turn, source in enumerate(self._sources):
            own = [index // len(self._sources) for index in done if index % len(self._sources) == turn]
            source.record_success(own, groups)

    def metrics(self) -> dict[str, float]:
        return {
            f"{key}/{name}": value
            for name, source in zip(self._names, self._sources, strict=True)
            for key, value in source.metrics().items()
        }

    def state(self) -> dict[str, Any]:
        return {name: source.state() for name, source in zip(self._names, self._sources, strict=True)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, source in zip(self._names, self._sources, strict=True):
            source.load_state(state[name])
