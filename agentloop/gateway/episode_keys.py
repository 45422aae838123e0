"""The keys of agents: a separate key for each episode and attempt, which is stored nowhere, or one key for all.

The keys have their own module so that nothing else holds the secret.
"""

import hmac
import secrets

from agentloop.gateway.agent_request import BadRequest


class EpisodeKeys:
    """Keys computed from a secret of this process. From one key nobody can compute another."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def key(self, episode: str) -> str:
        """Compute HMAC-SHA256 of an episode's id. Each attempt at a task has an id of its own."""
        return hmac.new(self._secret, episode.encode("utf-8", "surrogatepass"), "sha256").hexdigest()

    def check(self, episode: str, given: str) -> None:
        """Check an episode's key. Raises BadRequest for any other."""
        if not hmac.compare_digest(self.key(episode).encode(), given.encode("utf-8", "surrogatepass")):
            raise BadRequest(403, "The key must be this episode's, got another.")


class SharedKey:
    """The one key of all agents of a gateway without a run."""

    def __init__(self, key: str | None) -> None:
        """None: the gateway answers everybody who reaches it."""
        self._key = key

    def check(self, given: str) -> None:
        """Check the key. Raises BadRequest for any other."""
        if self._key is not None and not hmac.compare_digest(
            self._key.encode("utf-8", "surrogatepass"), given.encode("utf-8", "surrogatepass")
        ):
            raise BadRequest(403, "The key must be the gateway's, got another.")
