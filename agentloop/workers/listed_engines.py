"""Which weights the engines serve, as the learner reports it."""

from __future__ import annotations

from collections.abc import Sequence

from agentloop.engines.remote.engine_client import RemoteEngine
from replay.ticket_records import SERVING, Participant


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
