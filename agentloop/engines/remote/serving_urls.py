"""Which engines may be asked, for which weights, and which of them an episode asks."""

import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

UNLABELLED = "default"
"""What vLLM calls the weights it was started with, and so also those it comes back with after a crash."""
_REST_S = 5.0


@dataclass(frozen=True)
class Weights:
    """What an engine was proved to serve."""

    version: int
    adapter: str | None = None
    """The LoRA adapter's name, which is then the model that is asked for; None where the model itself was reloaded."""


class ServingUrls:
    """The engines of a run. An episode asks the same one as long as it can, for that one has its prefix cached."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = tuple(urls)
        self.serving: dict[str, Weights] = {}
        """What each engine serves now; an engine for which that has not been proved is not in here."""
        self.versions: dict[str, dict[str, int]] = {url: {} for url in urls}
        """All that an engine was ever proved for, by the label that its spans give them."""
        self._rests_until = dict.fromkeys(urls, 0.0)
        self._gone_since: dict[str, float] = {}
        self.newest: int | None = None
        """The version that was published last; None: none was."""

    def published(self, version: int, *, label: str, adapter: str | None, urls: Collection[str]) -> None:
        """The engines at `urls` were proved to serve this version; the others go on with theirs."""
        for url in urls:
            self.versions[url][label] = version
            self.serving[url] = Weights(version, adapter)
        self.newest = version
        self._rests_until |= dict.fromkeys(urls, 0.0)

    def withdraw(self, url: str) -> None:
        """Ask this engine no more until it is published to again: its weights are not known."""
        self.serving.pop(url, None)

    def failed(self, url: str) -> None:
        """Let other episodes go round it for a moment, where there is another."""
        self._rests_until[url] = time.monotonic() + _REST_S

    def gone(self, url: str) -> float:
        """Note that it can't be reached, or has lost its weights; seconds since it first was so."""
        now = time.monotonic()
        return now - self._gone_since.setdefault(url, now)

    def replied(self, url: str) -> None:
        """Note that it is there, with its weights."""
        self._gone_since.pop(url, None)

    def choose(self, episode: int, tried: Collection[str]) -> str | None:
        """The engine to ask, rather one that was not `tried` for this turn; None where none serves."""
        now = time.monotonic()

        def rank(url: str) -> tuple[bool, bool, bytes]:
            # Every episode has its own order of engines; that of the others stays when one is gone.
            own = hashlib.blake2b(f"{episode} {url}".encode(), digest_size=8).digest()
            return url in tried, self._rests_until[url] > now, own

        return min(self.serving, key=rank, default=None)
