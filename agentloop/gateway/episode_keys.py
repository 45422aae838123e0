"""The keys that agents ask with: one for each episode and attempt, and none of them stands anywhere; or one for all.

A module of its own: nothing else may hold the secret.
"""

import hmac
import secrets

from agentloop.gateway.agent_request import BadRequest


class EpisodeKeys:
    """Keys that follow from a secret of this process: a key says nothing about another one."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def key(self, episode: str) -> str:
        """HMAC-SHA256 of an episode's id, which is another one for each attempt at a task."""
        return hmac.new(self._secret, episode.encode("utf-8", "surrogatepass"), "sha256").hexdigest()

    def check(self, episode: str, given: str) -> None:
        """Raises BadRequest for any key but this episode's."""
        if not hmac.compare_digest(self.key(episode).encode(), given.encode("utf-8", "surrogatepass")):
            raise BadRequest(403, "The key must be this episode's, got another.")


class SharedKey:
    """The key of all who may ask a gateway that stands by itself."""

    def __init__(self, key: str | None) -> None:
        """None: whoever reaches it may ask."""
        self._key = key

    def check(self, given: str) -> None:
        """Raises BadRequest for any other key."""
        if self._key is not None and not hmac.compare_digest(
            self._key.encode("utf-8", "surrogatepass"), given.encode("utf-8", "surrogatepass")
        ):
            raise BadRequest(403, "The key must be the gateway's, got another.")
