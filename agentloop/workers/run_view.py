"""What a worker sees of its run: how often it looks while it waits, and which weights the engines serve."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentloop.engines.remote.engine_client import RemoteEngine
from replay.storage.collecting.ticket_records import SERVING, Participant, RunView
from replay.store import ReplayStore

_LOOK_S = 0.25
_BUSY_LOOKS_A_SECOND, _IDLE_LOOKS_A_SECOND = 400, 20
"""Of all workers of a run together."""
_LONGEST_PAUSE = 0.75
"""Of a lease: who has not reported for a whole one counts as gone."""


class Looks:
    """Workers share one database: the more there are, the longer each waits until it looks again."""

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
        """At the first look a third of a lease after the last report."""
        return time.monotonic() >= self._next_report

    def report(self, facts: Mapping[str, Any]) -> None:
        """This worker is alive, and says this of itself; how many others are is counted."""
        self._store.roles.report("worker", self._run, self._worker, facts)
        self._workers = self._store.roles.count("worker", self._run, lease_s=self._lease_s)
        self._next_report = time.monotonic() + self._report_s

    def pause_s(self, *, busy: bool) -> float:
        """Seconds until the next look; those who wait look less often than those who have something to do."""
        looks = _BUSY_LOOKS_A_SECOND if busy else _IDLE_LOOKS_A_SECOND
        return min(max(_LOOK_S, self._workers / looks), _LONGEST_PAUSE * self._lease_s)


class ListedEngines:
    """Asks an engine for nothing but what the learner has proved it for."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._urls = frozenset(server.url for server in engine.servers)
        self._serving: dict[str, tuple[int, str, str | None]] = {}

    @property
    def any_serves(self) -> bool:
        return bool(self._serving)

    def update(self, listed: Sequence[Participant]) -> None:
        """What is served now; an engine that is being published to, or is not listed, is asked no more."""
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
