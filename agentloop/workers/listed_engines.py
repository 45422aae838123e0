"""The engines that a worker samples from, as the learner lists them."""

from collections.abc import Sequence

from agentloop.engines.remote.engine_client import RemoteEngine
from replay.storage.collecting.ticket_records import SERVING, Participant


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
