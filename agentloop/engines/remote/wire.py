"""vLLM's `/inference/v1/generate`, which says which weights sampled each token: what is sent, what comes back, and what
may be wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import index
from typing import Any, NamedTuple

from agentloop.errors import one_line

GENERATE = "/inference/v1/generate"


class FaultKind(StrEnum):
    CONNECTION = "connection"  # none, or it was lost before the answer began
    BUSY = "busy"  # status 429
    SERVER_ERROR = "server_error"  # status 5xx
    CUT_BODY = "cut_body"  # the answer ended in the middle, or is no JSON
    ABORTED = "aborted"  # the server gave the reply up
    UNPROVED_VERSION = "unproved_version"  # weights that this engine has not been proved for have sampled
    DEADLINE = "deadline"  # the turn's time was over
    REFUSED = "refused"  # any other status: the request is wrong, and stays so
    WRONG_REPLY = "wrong_reply"  # the answer does not hold what a reply to this request must


ASKED_AGAIN = frozenset(FaultKind) - {FaultKind.DEADLINE, FaultKind.REFUSED, FaultKind.WRONG_REPLY}
"""Faults that say nothing about what was sampled: the next try may pass, and samples as the first would have.

A reply that is wrong in itself is not asked for again. It is wrong because of its tokens (a cut one is a long one), so
a second try would prefer tokens that happen to pass, and no log-prob records such a preference.
"""

GONE = frozenset({FaultKind.CONNECTION, FaultKind.UNPROVED_VERSION})
"""The engine is restarting, or has restarted and is not proved yet: no try is lost by waiting for it."""


class EngineFault(Exception):
    """One try has given nothing that may be recorded."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class VersionSpan(NamedTuple):
    """Tokens `start` to `end` of a reply were sampled by the weights that the server calls `label`."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class WireReply:
    """An answer as it came; nothing but the types in it has been checked."""

    model: str | None
    prompt_tokens: int | None
    token_ids: Sequence[int]
    scored_ids: Sequence[int]
    """The tokens that the log-probs are said to be of."""
    log_probs: Sequence[float | None]
    finish_reason: str | None
    spans: Sequence[VersionSpan]
    likeliest: Mapping[int, float]
    """Log-probs of the likeliest tokens in the place of the last one; empty where they were not asked for."""
    prompt: Sequence[Any]
    """Log-probs of the prompt's tokens as vLLM writes them; empty where they were not asked for."""


def generate_body(
    model: str,
    prompt_ids: Sequence[int],
    *,
    temperature: float,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    likeliest: int = 0,
    scores_prompt: bool = False,
) -> dict[str, Any]:
    """A request for a reply from the whole distribution at `temperature`, and nothing else, as JSON."""
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
    if scores_prompt:
        sampling["prompt_logprobs"] = 0
    return {"model": model, "token_ids": list(prompt_ids), "sampling_params": sampling}


def read_reply(answer: Any) -> WireReply:
    """What came back. Raises EngineFault where it is not what the route answers with."""
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
            # No span covers no token, so that a reply without spans is refused.
            spans=[
                VersionSpan(str(span["version"]), index(span["start"]), index(span["end"]))
                for span in choice.get("weight_versions") or []
            ],
            likeliest={index(one["token_id"]): float(one["logprob"]) for one in top},
            prompt=answer.get("prompt_logprobs") or [],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EngineFault(FaultKind.WRONG_REPLY, f"not what the route answers with: {one_line(error)}") from error
