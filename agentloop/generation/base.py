"""What a rollout asks of an engine: token ids in; token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class GenerationRequest:
    episode: int
    """Stays the same over the turns of one episode: an engine may keep a cache under it."""
    prompt_ids: Sequence[int]
    """The whole prompt, exactly; extends the episode's previous prompt and reply unless history was rewritten."""
    max_new_tokens: int


@dataclass(frozen=True)
class Completion:
    token_ids: tuple[int, ...]
    """As sampled, the stop token included when one was sampled."""
    log_probs: tuple[float, ...]
    """Nats, one per token, over the whole vocabulary at the sampling temperature (at 1 when greedy)."""
    entropies: tuple[float, ...]
    """Nats, of the distribution each token was sampled from."""


class Generator(Protocol):
    """An engine that samples from the published policy."""

    @property
    def policy_version(self) -> int:
        """Publishes before now."""
        ...

    def begin(self, *, seed: int, temperature: float) -> None:
        """Start a batch of episodes: forget caches, seed the sampling. Temperature 0 is greedy."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """One reply per request, in their order."""
        ...
