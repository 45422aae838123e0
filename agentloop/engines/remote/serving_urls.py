"""Records which weights each engine serves, and chooses the engine for each turn."""

import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

UNLABELLED = "default"
"""vLLM's label for the weights it was started with, which it has again after a crash."""
_REST_S = 5.0


@dataclass(frozen=True)
class Weights:
    """The weights that an engine was proved to serve."""

    version: int
    adapter: str | None = None
    """The LoRA adapter's name, which requests then name as their model; None where the model itself was reloaded."""


class ServingUrls:
    """The engines of a run. An episode stays with one engine as long as it can: that engine has its prefix cached."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = tuple(urls)
        self.serving: dict[str, Weights] = {}
        """The weights that each engine serves now. An engine whose weights are not proved is absent."""
        self.versions: dict[str, dict[str, int]] = {url: {} for url in urls}
        """All versions that an engine was ever proved for, by the label in its replies' spans."""
        self._rests_until = dict.fromkeys(urls, 0.0)
        self._gone_since: dict[str, float] = {}
        self.newest: int | None = None
        """The version that was published last; None before the first publish."""

    def set_serving(self, version: int, *, label: str, adapter: str | None, urls: Collection[str]) -> None:
        """Note that the engines at `urls` were proved to serve this version; the other engines keep their versions."""
        for url in urls:
            self.versions[url][label] = version
            self.serving[url] = Weights(version, adapter)
        self.newest = version
        self._rests_until |= dict.fromkeys(urls, 0.0)

    def note_failure(self, url: str) -> None:
        """Let episodes avoid this engine for a moment, where there is another."""
        self._rests_until[url] = time.monotonic() + _REST_S

    def note_gone(self, url: str) -> float:
        """Note that an engine can't be reached, or has lost its weights; return for how many seconds."""
        now = time.monotonic()
        return now - self._gone_since.setdefault(url, now)

    def note_reply(self, url: str) -> None:
        """Note that an engine is up, with its weights."""
        self._gone_since.pop(url, None)

    def choose(self, episode: int, tried: Collection[str]) -> str | None:
        """Choose the engine for a turn, if possible one that it has not `tried`; None where none serves."""
        now = time.monotonic()

        def rank(url: str) -> tuple[bool, bool, bytes]:
            # Every episode has its own order of engines. When one is gone, the order of the others stays.
            own = hashlib.blake2b(f"{episode} {url}".encode(), digest_size=8).digest()
            return url in tried, self._rests_until[url] > now, own

        return min(self.serving, key=rank, default=None)
