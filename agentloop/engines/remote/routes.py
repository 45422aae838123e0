"""The two routes of vLLM that take token ids: what is sent, and what comes back.

Only fields that vLLM is known to obey are sent, for it ignores the others without a word. Every setting that would
change what is sampled is sent: `/v1/completions` takes the others from the model's `generation_config.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, Protocol

from agentloop.engines.remote.faults import EngineFault, FaultKind
from agentloop.errors import one_line

_TOKEN_ID = "token_id:"


class VersionSpan(NamedTuple):
    """Tokens `start` to `end` of a reply were sampled by the weights that the server calls `label`."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class WireReply:
    """An answer as it came, whichever route it took; nothing but the types in it has been checked."""

    model: str | None
    prompt_tokens: int | None
    token_ids: Sequence[int]
    scored_ids: Sequence[int]
    """The tokens that the log-probs are said to be of."""
    log_probs: Sequence[float | None]
    finish_reason: str | None
    spans: Sequence[VersionSpan] | None
    """None where the route never says."""
    likeliest: Mapping[int, float]
    """Log-probs of the likeliest tokens in the place of the last one; empty where they were not asked for."""
    prompt: Sequence[Any]
    """Log-probs of the prompt's tokens as vLLM writes them; empty where they were not asked for."""


class Route(Protocol):
    path: str
    names_versions: bool
    """Whether its replies say which weights sampled each token."""

    def body(self, model: str, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """What is sent, as JSON."""
        ...

    def read(self, answer: Any) -> WireReply:
        """What came back. Raises EngineFault where it is not what this route answers with."""
        ...


def sampling_fields(
    temperature: float, max_new_tokens: int, *, stop_ids: Sequence[int] = (), likeliest: int = 0
) -> dict[str, Any]:
    """Settings that both routes know by these names: the whole distribution at `temperature`, and nothing else."""
    return {
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
    }


class GenerateRoute:
    """`/inference/v1/generate`: it says which weights sampled each token."""

    path = "/inference/v1/generate"
    names_versions = True

    def body(self, model: str, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        return {"model": model, "token_ids": list(prompt_ids), "sampling_params": {**sampling, "detokenize": False}}

    def read(self, answer: Any) -> WireReply:
        with _understood():
            (choice,) = answer["choices"]
            scored = (choice.get("logprobs") or {}).get("content") or []
            # An empty list covers no token, so that a reply without spans is refused.
            spans = [
                VersionSpan(str(span["version"]), index(span["start"]), index(span["end"]))
                for span in choice.get("weight_versions") or []
            ]
            top = (scored[-1].get("top_logprobs") or []) if scored else []
            return WireReply(
                model=answer.get("model"),
                prompt_tokens=_prompt_tokens(answer),
                token_ids=list(map(index, choice.get("token_ids") or [])),
                scored_ids=[index(one["token_id"]) for one in scored],
                log_probs=[_number(one["logprob"]) for one in scored],
                finish_reason=choice.get("finish_reason"),
                spans=spans,
                likeliest={index(one["token_id"]): float(one["logprob"]) for one in top},
                prompt=answer.get("prompt_logprobs") or [],
            )


class CompletionsRoute:
    """`/v1/completions` with token ids: any vLLM has it, and it does not say which weights sampled."""

    path = "/v1/completions"
    names_versions = False

    def body(self, model: str, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        ids = {"return_tokens_as_token_ids": True, "return_token_ids": True}
        return {"model": model, "prompt": list(prompt_ids), **sampling, **ids}

    def read(self, answer: Any) -> WireReply:
        with _understood():
            (choice,) = answer["choices"]
            scored = choice.get("logprobs") or {}
            scored_ids = list(map(_token_id, scored.get("tokens") or []))
            given = choice.get("token_ids")
            top = (scored.get("top_logprobs") or [{}])[-1] or {}
            return WireReply(
                model=answer.get("model"),
                prompt_tokens=_prompt_tokens(answer),
                token_ids=scored_ids if given is None else list(map(index, given)),
                scored_ids=scored_ids,
                log_probs=list(map(_number, scored.get("token_logprobs") or [])),
                finish_reason=choice.get("finish_reason"),
                spans=None,
                likeliest={_token_id(name): float(value) for name, value in top.items()},
                prompt=choice.get("prompt_logprobs") or [],
            )


@contextmanager
def _understood() -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EngineFault(FaultKind.WRONG_REPLY, f"not what the route answers with: {one_line(error)}") from error


def _prompt_tokens(answer: Any) -> int | None:
    count = (answer.get("usage") or {}).get("prompt_tokens")
    return None if count is None else index(count)


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _token_id(token: str) -> int:
    """The id in `token_id:17`, which stands where the token's text would."""
    number = token.removeprefix(_TOKEN_ID)
    if number == token or not number.isdecimal():
        raise ValueError("texts of tokens where their ids were asked for")
    return int(number)
