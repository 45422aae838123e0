"""A reply is recorded, and so trained, only if everything it says of itself holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from agentloop.engines.generator import Completion, GenerationRequest
from agentloop.engines.remote.faults import EngineFault, FaultKind
from agentloop.engines.remote.routes import VersionSpan, WireReply
from agentloop.engines.remote.serving_urls import Weights

_ROUNDING = 1e-6
"""A log-prob this far above 0 is a rounding error of softmax."""
_UNKNOWN = -9999.0
"""vLLM sends this for NaN, for minus infinity, and where it does not know."""


@dataclass(frozen=True)
class Vocabulary:
    """What a policy's tokens may be."""

    size: int
    stop_ids: frozenset[int]


def believed(
    reply: WireReply,
    request: GenerationRequest,
    *,
    vocabulary: Vocabulary,
    weights: Weights,
    versions: Mapping[str, int],
) -> Completion:
    """The completion that may be recorded. Raises EngineFault for any other reply.

    `weights` were asked for; `versions` are those that the engine was proved for, by the label its spans give them.
    """
    if reply.finish_reason == "abort":
        raise EngineFault(FaultKind.ABORTED, "the server gave the reply up")
    if reply.prompt_tokens != len(request.prompt_ids):
        text = f"{reply.prompt_tokens} tokens read of a prompt of {len(request.prompt_ids)}"
        raise EngineFault(FaultKind.PROMPT_TOKENS, text)
    log_probs = _scored(reply)
    _check_tokens(reply, vocabulary)
    _check_end(reply, request, vocabulary.stop_ids)
    return Completion(tuple(reply.token_ids), log_probs, _versions(reply, weights, versions))


def _scored(reply: WireReply) -> tuple[float, ...]:
    """The log-probs, one to each token."""
    n = len(reply.token_ids)
    if n == 0 or len(reply.log_probs) != n or len(reply.scored_ids) != n:
        raise EngineFault(FaultKind.LENGTHS, f"{len(reply.log_probs)} log-probs for {n} tokens")
    pairs = zip(reply.token_ids, reply.scored_ids, strict=True)
    other = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if other is not None:
        raise EngineFault(FaultKind.TOKEN_IDS, f"the log-prob of token {other[1]} beside token {other[0]}")
    known = tuple(value for value in reply.log_probs if value is not None)
    odd = next((value for value in known if not math.isfinite(value) or value <= _UNKNOWN), None)
    if odd is not None or len(known) != n:
        raise EngineFault(FaultKind.LOG_PROBS, f"a log-prob of {odd}, which stands for none")
    if max(known) > _ROUNDING:
        raise EngineFault(FaultKind.LOG_PROBS, f"a log-prob of {max(known)}, which is above 0")
    return known


def _check_tokens(reply: WireReply, vocabulary: Vocabulary) -> None:
    outside = next((token for token in reply.token_ids if not 0 <= token < vocabulary.size), None)
    if outside is not None:
        raise EngineFault(FaultKind.VOCABULARY, f"token {outside} of a vocabulary of {vocabulary.size}")


def _check_end(reply: WireReply, request: GenerationRequest, stop_ids: frozenset[int]) -> None:
    """A reply ends at its first stop token, or at its length."""
    n, limit = len(reply.token_ids), request.max_new_tokens
    if n > limit:
        raise EngineFault(FaultKind.TOO_MANY_TOKENS, f"{n} tokens where {limit} were asked for")
    stop = next((place for place, token in enumerate(reply.token_ids) if token in stop_ids), None)
    if stop is not None and stop < n - 1:
        text = f"{n - 1 - stop} tokens after the stop token {reply.token_ids[stop]}"
        raise EngineFault(FaultKind.FINISH_REASON, text)
    if reply.finish_reason == "length":
        if n < limit:
            raise EngineFault(FaultKind.CUT_SHORT, f"a reply of {n} tokens that is cut where {limit} were asked for")
        return
    if reply.finish_reason != "stop":
        raise EngineFault(FaultKind.FINISH_REASON, f"a reply that ended by {reply.finish_reason!r}")
    if stop is None:
        text = f"a reply that stopped at token {reply.token_ids[-1]}, which is no stop token of the policy"
        raise EngineFault(FaultKind.FINISH_REASON, text)


def _versions(reply: WireReply, weights: Weights, versions: Mapping[str, int]) -> int | tuple[int, ...]:
    """The version of all tokens, or one for each."""
    if weights.adapter is not None:
        # The server's spans are then those of the model below the adapter, which is the same for all versions.
        if reply.model != weights.adapter:
            raise EngineFault(FaultKind.OTHER_MODEL, f"a reply of {reply.model!r}, asked of {weights.adapter!r}")
        return weights.version
    if reply.spans is None:
        return weights.version
    check_spans(reply.spans, len(reply.token_ids))
    unproved = next((span.label for span in reply.spans if span.label not in versions), None)
    if unproved is not None:
        text = f"tokens of weights {unproved!r}, for which the engine has not been proved"
        raise EngineFault(FaultKind.UNPROVED_VERSION, text)
    found = {versions[span.label] for span in reply.spans}
    if len(found) == 1:
        return found.pop()
    return tuple(versions[span.label] for span in reply.spans for _ in range(span.start, span.end))


def check_spans(spans: tuple[VersionSpan, ...], n: int) -> None:
    """Raises EngineFault unless each of `n` tokens is in exactly one span."""
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            text = f"a span of tokens {span.start} to {span.end} after one that ends at {end}"
            raise EngineFault(FaultKind.VERSION_SPANS, text)
        end = span.end
    if end != n:
        raise EngineFault(FaultKind.VERSION_SPANS, f"spans that end at token {end} of {n}")
