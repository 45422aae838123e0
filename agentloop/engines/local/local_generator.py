"""Batched sampling from a model in this process, with a key-value cache that stays during an episode.

All running episodes take their turns together. A turn feeds only the new tokens since the last turn (the stop token,
the tool result, the next header), and ended episodes are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentloop.config.sections.model import ComputeSection
from agentloop.engines.generator import GenerationRequest, SampledTokens
from agentloop.engines.local.cache import EpisodeCache
from agentloop.errors import TrainingStopped
from agentloop.records import Completion
from context.parse.reply import before_stop
from context.tokens.token_sequence import MOST_TOKENS_OF_A_CHARACTER, Decoder

_FEW_RUNNING = 0.5
"""The share of running rows from which on copying their keys and values is cheaper than the other rows' holes."""


class StopStrings:
    """Finds out whether the last sampled token completed one of `texts`, which ends the reply."""

    def __init__(self, texts: Sequence[str], codec: Decoder) -> None:
        self._texts, self._codec = tuple(texts), codec
        # A token stands for at least a byte.
        self._longest = max((len(text.encode()) for text in texts), default=0) + MOST_TOKENS_OF_A_CHARACTER

    def __bool__(self) -> bool:
        return bool(self._texts)

    def with_texts(self, further: Sequence[str]) -> StopStrings:
        return StopStrings((*self._texts, *further), self._codec) if further else self

    def completed(self, token_ids: Sequence[int]) -> bool:
        return before_stop(self._codec.decode(token_ids[-self._longest :]), self._texts) is not None


class LocalGenerator:
    """Samples from the current weights of `model`; `published()` counts its versions."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_ids: frozenset[int],
        stop_strings: StopStrings | None = None,
        policy_version: int = 0,
        compute: ComputeSection | None = None,
    ) -> None:
        """Only `autocast` of `compute` is used, the type to multiply in. The other settings are about scoring."""
        self.model = model
        self._autocast = compute is not None and compute.autocast == "bfloat16"
        self._stop_ids = stop_ids
        self._stop_strings = stop_strings
        self.policy_version = policy_version
        self._random = torch.Generator(device=model.device)
        self._temperature = 1.0
        self._cache = EpisodeCache(self.model)

    def published(self, version: int) -> None:
        """Note that the model has new weights."""
        self.policy_version = version
        self._cache.forget()

    def begin(self, *, seed: int, temperature: float) -> None:
        self._random.manual_seed(seed)
        self._temperature = temperature
        self._cache.forget()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        if not requests:
            return []
        stops = self._stop_strings
        each_stops = [None if stops is None else stops.with_texts(request.stop) for request in requests]
        replies = [_Reply(r.max_new_tokens, its, r.sampled) for r, its in zip(requests, each_stops, strict=True)]
        # Autocast spans all steps, so weights are cast once. In inference mode each step would cast them.
        with (
            torch.no_grad() if self._autocast else torch.inference_mode(),
            torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._autocast),
        ):
            if not self._cache.narrow_to(requests):
                self._cache.admit(requests)
            logits = self._cache.feed([list(r.prompt_ids[self._cache.num_fed(r.episode) :]) for r in requests])
            self._decode(self._cache, replies, logits)
        return [reply.completion(self.policy_version) for reply in replies]

    def _decode(self, cache: EpisodeCache, replies: Sequence[_Reply], logits: Tensor) -> None:
        """Sample until every reply has ended. Ended rows get holes. The last few rows are fed as a copy."""
        while True:
            self._add(replies, logits)
            # A reply's last token is not fed: it is part of the next turn's new tokens.
            chunks = [[] if reply.ended else [reply.token_ids[-1]] for reply in replies]
            running = [row for row, chunk in enumerate(chunks) if chunk]
            if not running:
                return
            part = cache.part(running) if len(running) <= len(replies) * _FEW_RUNNING else None
            if part is not None:
                logits = part.feed([chunks[row] for row in running])
                self._decode(part, [replies[row] for row in running], logits)
                cache.rejoin(running, part)
                return
            logits = cache.feed(chunks)

    def _add(self, replies: Sequence[_Reply], logits: Tensor) -> None:
        # One transfer, so one wait for the GPU.
        sampled = torch.stack([values.double() for values in self._sample(logits)]).tolist()
        for reply, token, log_prob, entropy in zip(replies, *sampled, strict=True):
            if math.isnan(log_prob):
                raise TrainingStopped(
                    f"log-probs of the policy must be numbers, got NaN from policy version {self.policy_version}. "
                    "Its weights are NaN or too large: lower optimizer.learning_rate, or check the files of the model."
                )
            if reply.ended:
                continue
            reply.add(int(token), log_prob, entropy, stop_ids=self._stop_ids)

    def _sample(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        greedy = self._temperature == 0.0
        scores = torch.log_softmax(logits.float() / (1.0 if greedy else self._temperature), dim=-1)
        probabilities = scores.exp()
        if greedy:
            tokens = scores.argmax(dim=-1)
        else:
            tokens = self._draw_tokens(probabilities)
        # A probability that underflows to 0 has a log of -inf; its product counts as 0.
        entropies = -(probabilities * scores.clamp_min(-1e4)).sum(dim=-1)
        return tokens, scores.gather(1, tokens[:, None])[:, 0], entropies

    def _draw_tokens(self, probabilities: Tensor) -> Tensor:
        """Draw a token per row by inverting the distribution function: ten times cheaper than torch.multinomial."""
        cumulative = probabilities.double().cumsum(dim=-1)
        uniform = torch.rand(
            (len(cumulative), 1), generator=self._random, dtype=torch.float64, device=cumulative.device
        )
        # right=True skips entries of probability 0; the product stays below the total because uniform < 1.
        chosen = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
        # Among NaNs the search ends behind the last token; `_decode` refuses what is found there.
        return chosen.clamp_max(cumulative.shape[1] - 1)


@dataclass
class _Reply:
    max_new_tokens: int
    stops: StopStrings | None
    sampled: SampledTokens
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    ended: bool = False

    def add(self, token: int, log_prob: float, entropy: float, *, stop_ids: frozenset[int]) -> None:
        self.token_ids.append(token)
        self.sampled.count += 1
        self.log_probs.append(log_prob)
        self.entropies.append(entropy)
        self.ended = token in stop_ids or len(self.token_ids) >= self.max_new_tokens
        if self.stops and not self.ended:
            self.ended = self.stops.completed(self.token_ids)

    def completion(self, policy_version: int) -> Completion:
        return Completion(tuple(self.token_ids), tuple(self.log_probs), policy_version, tuple(self.entropies))
