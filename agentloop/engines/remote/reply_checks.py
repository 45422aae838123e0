"""A reply is recorded, and so trained, only if everything it says of itself holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentloop.engines.generator import Completion, GenerationRequest, reply_problem
from agentloop.engines.remote.serving_urls import Weights
from agentloop.engines.remote.wire import EngineFault, FaultKind, VersionSpan, WireReply

_UNKNOWN = -9999.0
"""vLLM sends this for NaN, for minus infinity, and where it does not know."""


def checked_reply(
    reply: WireReply,
    request: GenerationRequest,
    *,
    stop_ids: frozenset[int],
    vocab_size: int,
    weights: Weights,
    versions: Mapping[str, int],
) -> Completion:
    """The completion that may be recorded. Raises EngineFault for any other reply.

    `weights` were asked for; `versions` are those that the engine was proved for, by the label its spans give them.
    """
    if reply.finish_reason == "abort":
        raise EngineFault(FaultKind.ABORTED, "the server gave the reply up")
    log_probs = tuple(value for value in reply.log_probs if value is not None)
    completion = Completion(tuple(reply.token_ids), log_probs, weights.version)
    problem = (
        _scoring_problem(reply, request)
        or reply_problem(request, completion, vocab_size=vocab_size)
        or _end_problem(reply, request, stop_ids)
    )
    if problem is not None:
        raise EngineFault(FaultKind.WRONG_REPLY, problem)
    return replace(completion, policy_version=_versions(reply, weights, versions))


def _scoring_problem(reply: WireReply, request: GenerationRequest) -> str | None:
    if reply.prompt_tokens != len(request.prompt_ids):
        return f"{reply.prompt_tokens} tokens read of a prompt of {len(request.prompt_ids)}"
    if len(reply.scored_ids) == len(reply.token_ids) and list(reply.scored_ids) != list(reply.token_ids):
        return "log-probs of other tokens than those of the reply"
    odd = [value for value in reply.log_probs if value is None or value <= _UNKNOWN]
    return f"a log-prob of {odd[0]}, which stands for none" if odd else None


def _end_problem(reply: WireReply, request: GenerationRequest, stop_ids: frozenset[int]) -> str | None:
    """A reply ends at its first stop token, or at its length."""
    n = len(reply.token_ids)
    stop = next((place for place, token in enumerate(reply.token_ids) if token in stop_ids), None)
    if stop is not None and stop < n - 1:
        return f"{n - 1 - stop} tokens after the stop token {reply.token_ids[stop]}"
    if reply.finish_reason == "length":
        limit = request.max_new_tokens
        return f"a reply of {n} tokens that is cut where {limit} were asked for" if n < limit else None
    if reply.finish_reason != "stop":
        return f"a reply that ended by {reply.finish_reason!r}"
    if stop is None:
        return f"a reply that stopped at token {reply.token_ids[-1]}, which is no stop token of the policy"
    return None


def _versions(reply: WireReply, weights: Weights, versions: Mapping[str, int]) -> int | tuple[int, ...]:
    """The version of all tokens, or one for each."""
    if weights.adapter is not None:
        # The server's spans are then those of the model below the adapter, which is the same for all versions.
        if reply.model != weights.adapter:
            text = f"a reply of {reply.model!r}, asked of {weights.adapter!r}"
            raise EngineFault(FaultKind.WRONG_REPLY, text)
        return weights.version
    _check_spans(reply.spans, len(reply.token_ids))
    unproved = next((span.label for span in reply.spans if span.label not in versions), None)
    if unproved is not None:
        text = f"tokens of weights {unproved!r}, for which the engine has not been proved"
        raise EngineFault(FaultKind.UNPROVED_VERSION, text)
    each = tuple(versions[span.label] for span in reply.spans for _ in range(span.start, span.end))
    return each[0] if len(set(each)) == 1 else each


def _check_spans(spans: Sequence[VersionSpan], n: int) -> None:
    """Raises EngineFault unless each of `n` tokens is in exactly one span."""
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    if [*starts, n] != [0, *ends] or any(span.end <= span.start for span in spans):
        found = ", ".join(f"{span.start} to {span.end}" for span in spans) or "none"
        raise EngineFault(FaultKind.WRONG_REPLY, f"spans of weights that do not cover its {n} tokens once: {found}")
