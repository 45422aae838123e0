"""Requests and replies of vLLM's `/inference/v1/generate`, whose replies name the weights that sampled each token.

A reply is recorded, and so trained, only if everything that it states about itself is consistent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import index
from typing import Any, NamedTuple

from agentloop.engines.generator import GenerationRequest, reply_problem
from agentloop.engines.remote.serving_urls import Weights
from agentloop.errors import one_line
from agentloop.records import Completion

GENERATE = "/inference/v1/generate"


class FaultKind(StrEnum):
    CONNECTION = "connection"  # no connection, or it was lost before the answer began
    BUSY = "busy"  # status 429
    SERVER_ERROR = "server_error"  # status 5xx
    CUT_BODY = "cut_body"  # the answer ended early, or is not JSON
    ABORTED = "aborted"  # the server aborted the reply
    UNPROVED_VERSION = "unproved_version"  # weights for which the engine was not proved have sampled
    DEADLINE = "deadline"  # the turn took too long
    REFUSED = "refused"  # any other status: the request is wrong, and a second one would be
    WRONG_REPLY = "wrong_reply"  # the answer is not a valid reply to this request


RETRIED_FAULTS = frozenset(FaultKind) - {FaultKind.DEADLINE, FaultKind.REFUSED, FaultKind.WRONG_REPLY}
"""Faults that do not depend on the sampled tokens. The turn is tried again, and samples as the first try would have.

A wrong reply is not retried. It is wrong because of its tokens (a reply that is cut is a long one), so a second try
would prefer tokens that happen to pass, and no log-prob records that preference.
"""

GONE_FAULTS = frozenset({FaultKind.CONNECTION, FaultKind.UNPROVED_VERSION})
"""Faults of an engine that restarts, or is not proved again yet: they do not count as tries."""


class EngineFault(Exception):
    """One try gave no reply that may be recorded."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class VersionSpan(NamedTuple):
    """The weights labelled `label` sampled the tokens `start` to `end` of a reply."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class WireReply:
    """An answer as it arrived; only its types are checked."""

    model: str | None
    prompt_tokens: int | None
    token_ids: Sequence[int]
    scored_ids: Sequence[int]
    """The tokens to which the log-probs belong, as the server states it."""
    log_probs: Sequence[float | None]
    finish_reason: str | None
    spans: Sequence[VersionSpan]
    likeliest: Mapping[int, float]
    """Log-probs of the likeliest tokens at the last place; empty unless requested."""
    prompt: Sequence[Any]
    """Log-probs of the prompt's tokens as vLLM writes them; empty unless requested."""


def generate_body(
    model: str,
    prompt_ids: Sequence[int],
    *,
    temperature: float,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    likeliest: int = 0,
    scores_prompt: bool = False,
) -> dict[str, Any]:
    """Write a request, as JSON, for a reply sampled from the whole distribution at `temperature`."""
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "max_tokens": max_new_tokens,
        "stop_token_ids": list(stop_ids),
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": likeliest,
        "detokenize": False,
    }
    if stop:  # vLLM finds texts only where it decodes the tokens; a stop may be the text of a control token
        sampling |= {"stop": list(stop), "detokenize": True, "skip_special_tokens": False}
    if scores_prompt:
        sampling["prompt_logprobs"] = 0
    return {"model": model, "token_ids": list(prompt_ids), "sampling_params": sampling}


def read_reply(answer: Any) -> WireReply:
    """Read an answer's JSON. Raises EngineFault if it is no reply of this route."""
    try:
        (choice,) = answer["choices"]
        scored = (choice.get("logprobs") or {}).get("content") or []
        top = (scored[-1].get("top_logprobs") or []) if scored else []
        count = (answer.get("usage") or {}).get("prompt_tokens")
        return WireReply(
            model=answer.get("model"),
            prompt_tokens=None if count is None else index(count),
            token_ids=list(map(index, choice.get("token_ids") or [])),
            scored_ids=[index(one["token_id"]) for one in scored],
            log_probs=[None if one["logprob"] is None else float(one["logprob"]) for one in scored],
            finish_reason=choice.get("finish_reason"),
            # Without spans no token is covered, so the reply is refused.
            spans=[
                VersionSpan(str(span["version"]), index(span["start"]), index(span["end"]))
                for span in choice.get("weight_versions") or []
            ],
            likeliest={index(one["token_id"]): float(one["logprob"]) for one in top},
            prompt=answer.get("prompt_logprobs") or [],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EngineFault(FaultKind.WRONG_REPLY, f"not what the route answers with: {one_line(error)}") from error


_UNKNOWN = -9999.0
"""vLLM sends this for NaN, for minus infinity, and for an unknown log-prob."""


def check_reply(
    reply: WireReply,
    request: GenerationRequest,
    *,
    stop_ids: frozenset[int],
    vocab_size: int,
    weights: Weights,
    versions: Mapping[str, int] | None,
) -> Completion:
    """Check a reply, and return it as a completion. Raises EngineFault if it must not be recorded.

    The request named `weights`. `versions` are the versions that the engine was proved for, by their label in spans.
    None: nobody publishes to the engine.
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
    return completion if versions is None else replace(completion, policy_version=_versions(reply, weights, versions))


def _scoring_problem(reply: WireReply, request: GenerationRequest) -> str | None:
    if reply.prompt_tokens != len(request.prompt_ids):
        return f"{reply.prompt_tokens} tokens read of a prompt of {len(request.prompt_ids)}"
    if len(reply.scored_ids) == len(reply.token_ids) and list(reply.scored_ids) != list(reply.token_ids):
        return "log-probs of other tokens than those of the reply"
    odd = [value for value in reply.log_probs if value is None or value <= _UNKNOWN]
    return f"a log-prob of {odd[0]}, which stands for none" if odd else None


def _end_problem(reply: WireReply, request: GenerationRequest, stop_ids: frozenset[int]) -> str | None:
    """Check that the reply ends at its first stop token, at its limit, or where the request names texts."""
    n = len(reply.token_ids)
    stop = next((place for place, token in enumerate(reply.token_ids) if token in stop_ids), None)
    if stop is not None and stop < n - 1:
        return f"{n - 1 - stop} tokens after the stop token {reply.token_ids[stop]}"
    if reply.finish_reason == "length":
        limit = request.max_new_tokens
        return f"a reply of {n} tokens that is cut where {limit} were asked for" if n < limit else None
    if reply.finish_reason != "stop":
        return f"a reply that ended by {reply.finish_reason!r}"
    if stop is None and not request.stop:
        return f"a reply that stopped at token {reply.token_ids[-1]}, which is no stop token of the policy"
    return None


def _versions(reply: WireReply, weights: Weights, versions: Mapping[str, int]) -> int | tuple[int, ...]:
    """Return one version for all tokens, or a version for each."""
    if weights.adapter is not None:
        # The spans then name the model below the adapter, which is the same for all versions.
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
    """Check that each of `n` tokens is in exactly one span. Raises EngineFault."""
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    if [*starts, n] != [0, *ends] or any(span.end <= span.start for span in spans):
        found = ", ".join(f"{span.start} to {span.end}" for span in spans) or "none"
        raise EngineFault(FaultKind.WRONG_REPLY, f"spans of weights that do not cover its {n} tokens once: {found}")
