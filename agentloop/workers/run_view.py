"""A worker's view of its run: how often it reads the database, and which weights the engines serve."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentloop.engines.remote.engine_client import RemoteEngine
from replay.storage.collecting.ticket_records import SERVING, Participant, RunView
from replay.store import ReplayStore

_LOOK_S = 0.25
_BUSY_LOOKS_A_SECOND, _IDLE_LOOKS_A_SECOND = 400, 20
"""The most looks of all workers of a run together."""
_LONGEST_PAUSE = 0.75
"""The longest pause as a part of a lease: a worker without a report for a whole lease counts as gone."""


class RunPoller:
    """Looks at the database of all workers. The more workers there are, the longer each waits between two looks."""

    def __init__(self, store: ReplayStore, run: str, worker: str, *, lease_s: float) -> None:
        self._store = store
        self._run = run
        self._worker = worker
        self._lease_s, self._report_s = lease_s, lease_s / 3
        self._workers = 1
        self._next_report = 0.0

    def look(self) -> RunView:
        return self._store.roles.view(self._run, lease_s=self._lease_s)

    @property
    def report_is_due(self) -> bool:
        """Whether a third of a lease has passed since the last report."""
        return time.monotonic() >= self._next_report

    def report(self, facts: Mapping[str, Any]) -> None:
        """Report these facts and that this worker is alive. Count the living workers."""
        self._store.roles.report("worker", self._run, self._worker, facts)
        self._workers = self._store.roles.count("worker", self._run, lease_s=self._lease_s)
        self._next_report = time.monotonic() + self._report_s

    def pause_s(self, *, busy: bool) -> float:
        """Return the seconds until the next look; idle workers look less often than busy ones."""
        looks = _BUSY_LOOKS_A_SECOND if busy else _IDLE_LOOKS_A_SECOND
        return min(max(_LOOK_S, self._workers / looks), _LONGEST_PAUSE * self._lease_s)


class ListedEngines:
    """Limits the engine client to engines that the learner lists as serving."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._urls = frozenset(server.url for server in engine.servers)
        self._serving: dict[str, tuple[int, str, str | None]] = {}

    @property
    def any_serves(self) -> bool:
        return bool(self._serving)

    def update(self, listed: Sequence[Participant]) -> None:
        """Take the list of engines. An absent engine, or one that loads new weights, gets no requests meanwhile."""
        serving = {
            each.id: (int(each.facts["version"]), str(each.facts["label"]), each.facts["adapter"])
            for each in listed
            if each.id in self._urls and each.facts["state"] == SERVING
        }
        for url in self._serving.keys() - serving.keys():
            self._engine.withdraw(url)
        for url, weights in serving.items():
            if self._serving.get(url) != weights:
                version, label, adapter = weights
                self._engine.published(version, name=adapter, label=label, urls=[url])
        self._serving = serving
