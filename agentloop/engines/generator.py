"""What a rollout asks of an engine: token ids in; token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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
    policy_version: int | tuple[int, ...]
    """Publishes before the tokens were sampled: of all of them, or one number per token."""
    entropies: tuple[float, ...] | None = None
    """Nats, of the distribution each token was sampled from; None where the engine does not say."""


class GenerationFailed(Exception):
    """There is no usable reply, and why, in words. The episode ends; nothing of the reply is kept."""


class SamplingEngine(Protocol):
    """Samples from the published policy."""

    @property
    def policy_version(self) -> int:
        """Publishes before now."""
        ...

    def begin(self, *, seed: int, temperature: float) -> None:
        """Start a batch of episodes: forget caches, seed the sampling. Temperature 0 is greedy."""
        ...


class Generator(SamplingEngine, Protocol):
    """An engine that takes the requests of all episodes in one batch."""

    def generate(self, requests: Sequence[GenerationRequest]) -> Sequence[Completion | GenerationFailed]:
        """One reply per request, in their order; `GenerationFailed` in the place of one that could not be had.

        An engine that is gone altogether raises `GenerationFailed`: then every request failed.
        """
        ...


@runtime_checkable
class ConcurrentGenerator(SamplingEngine, Protocol):
    """An engine elsewhere, which batches what it is asked by itself."""

    async def reply(self, request: GenerationRequest) -> Completion:
        """The reply to one request. Raises GenerationFailed."""
        ...

    async def close(self) -> None:
        """Close what was opened on this event loop."""
        ...
