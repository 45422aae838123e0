"""The interface of engines: token ids in; token ids and log-probs out, which are checked before they are stored."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from agentloop.records import Completion, GenerationFailed


@dataclass
class SampledTokens:
    """Counts tokens for the progress that people see."""

    count: int = 0


@dataclass(frozen=True)
class GenerationRequest:
    episode: int
    """The episode's number, which all its turns share: an engine may cache under it."""
    prompt_ids: Sequence[int]
    """The whole prompt. It extends the episode's previous prompt and reply, unless history was rewritten."""
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    """Texts that end the reply, besides the policy's own. The token that completes one is the reply's last."""
    sampled: SampledTokens = field(default_factory=SampledTokens, compare=False)
    """An engine that samples in this process counts each token here at once."""


class SamplingEngine(Protocol):
    """Samples from the published policy."""

    @property
    def policy_version(self) -> int:
        """The number of publishes so far."""

    def begin(self, *, seed: int, temperature: float) -> None:
        """Start a batch of episodes: forget caches, seed the sampling. Temperature 0 is greedy."""


class Generator(SamplingEngine, Protocol):
    """An engine that takes the requests of all episodes in one batch."""

    def generate(self, requests: Sequence[GenerationRequest]) -> Sequence[Completion | GenerationFailed]:
        """Sample a reply per request, in order; `GenerationFailed` replaces one. It is raised if the engine is gone."""


@runtime_checkable
class ConcurrentGenerator(SamplingEngine, Protocol):
    """An engine elsewhere, which batches concurrent requests by itself."""

    async def reply(self, request: GenerationRequest) -> Completion:
        """Sample the reply to one request. Raises GenerationFailed."""

    async def close(self) -> None:
        """Close the connections of this event loop."""


_ROUNDING = 1e-6
"""Up to here a log-prob above 0 is a rounding error of softmax."""


def replies(
    generator: Generator, requests: Sequence[GenerationRequest], *, vocab_size: int
) -> list[Completion | GenerationFailed]:
    """Ask for all replies at once. Each, in order, is a completion that can be recorded, or the reason for none."""
    try:
        given = generator.generate(requests)
    except GenerationFailed as failure:
        return [failure] * len(requests)
    if len(given) != len(requests):  # nobody can match replies and requests
        return [GenerationFailed(f"{len(given)} replies to {len(requests)} requests")] * len(requests)
    return [recordable(request, reply, vocab_size=vocab_size) for request, reply in zip(requests, given, strict=True)]


def recordable(
    request: GenerationRequest, reply: Completion | GenerationFailed, *, vocab_size: int
) -> Completion | GenerationFailed:
    """Return the reply if it can be recorded, else the reason why not."""
    problem = None if isinstance(reply, GenerationFailed) else reply_problem(request, reply, vocab_size=vocab_size)
    return reply if problem is None else GenerationFailed(problem)


def reply_problem(request: GenerationRequest, reply: Completion, *, vocab_size: int) -> str | None:
    """Say why an engine's reply can't be recorded. None: it can."""
    n = len(reply.token_ids)
    if not 1 <= n <= request.max_new_tokens:
        return f"{n} tokens where 1 to {request.max_new_tokens} were asked for"
    for name, values in (("log-probs", reply.log_probs), ("entropies", reply.entropies)):
        if values is not None and len(values) != n:
            return f"{len(values)} {name} for {n} tokens"
        odd = next((value for value in values or () if not math.isfinite(value)), None)
        if odd is not None:
            return f"{name} with {odd} among them"
    if max(reply.log_probs) > _ROUNDING:
        return f"a log-prob of {max(reply.log_probs)}, which is above 0"
    if not isinstance(reply.policy_version, int) and len(reply.policy_version) != n:
        return f"{len(reply.policy_version)} policy versions for {n} tokens"
    outside = next((token for token in reply.token_ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        return f"token {outside} of a vocabulary of {vocab_size}"
    return None
