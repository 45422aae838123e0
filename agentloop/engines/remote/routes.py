"""The two routes of vLLM that take token ids: what is sent, and what comes back.

Only fields that vLLM is known to obey are sent, for it ignores the others without a word. Every setting that would
change what is sampled is sent: `/v1/completions` takes the others from the model's `generation_config.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agentloop.engines.generator import GenerationRequest
from agentloop.engines.remote.faults import EngineFault, FaultKind

_TOKEN_ID = "token_id:"


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `start` to `end` of a reply were sampled by the weights that the server calls `label`."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class WireReply:
    """An answer as it came, whichever route it took; nothing of it has been checked."""

    model: str | None
    prompt_tokens: int | None
    token_ids: Sequence[int]
    scored_ids: Sequence[int]
    """The tokens that the log-probs are said to be of."""
    log_probs: Sequence[float | None]
    finish_reason: str | None
    spans: tuple[VersionSpan, ...] | None
    """None where the route never says."""


class Route(Protocol):
    path: str
    names_versions: bool
    """Whether its replies say which weights sampled each token."""

    def body(self, model: str, request: GenerationRequest, sampling: dict[str, Any]) -> dict[str, Any]:
        """What is sent, as JSON."""
        ...

    def read(self, body: bytes) -> WireReply:
        """What came back. Raises EngineFault where it is not what this route answers with."""
        ...


def sampling_fields(temperature: float, stop_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
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
    }


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True)


class _Usage(_Wire):
    prompt_tokens: int | None = None


class _Scored(_Wire):
    token_id: int
    logprob: float | None


class _ScoredTokens(_Wire):
    content: list[_Scored] | None = None


class _Span(_Wire):
    version: str
    start: int
    end: int


class _GenerateChoice(_Wire):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _ScoredTokens | None = None
    weight_versions: list[_Span] | None = None


class _GenerateAnswer(_Wire):
    model: str | None = None
    choices: list[_GenerateChoice]
    usage: _Usage | None = None


class _CompletionLogProbs(_Wire):
    tokens: list[str]
    token_logprobs: list[float | None]


class _CompletionChoice(_Wire):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _CompletionLogProbs | None = None


class _CompletionAnswer(_Wire):
    model: str | None = None
    choices: list[_CompletionChoice]
    usage: _Usage | None = None


class GenerateRoute:
    """`/inference/v1/generate`: it says which weights sampled each token."""

    path = "/inference/v1/generate"
    names_versions = True

    def body(self, model: str, request: GenerationRequest, sampling: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": model,
            "token_ids": list(request.prompt_ids),
            "sampling_params": {**sampling, "logprobs": 0, "detokenize": False},
        }

    def read(self, body: bytes) -> WireReply:
        answer = _parsed(_GenerateAnswer, body)
        choice = _only(answer.choices)
        scored = (choice.logprobs.content if choice.logprobs else None) or []
        # An empty list covers no token, so that a reply without spans is refused here.
        spans = choice.weight_versions or []
        return WireReply(
            model=answer.model,
            prompt_tokens=answer.usage.prompt_tokens if answer.usage else None,
            token_ids=choice.token_ids or [],
            scored_ids=[entry.token_id for entry in scored],
            log_probs=[entry.logprob for entry in scored],
            finish_reason=choice.finish_reason,
            spans=tuple(VersionSpan(span.version, span.start, span.end) for span in spans),
        )


class CompletionsRoute:
    """`/v1/completions` with token ids: any vLLM has it, and it does not say which weights sampled."""

    path = "/v1/completions"
    names_versions = False

    def body(self, model: str, request: GenerationRequest, sampling: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(request.prompt_ids),
            **sampling,
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }

    def read(self, body: bytes) -> WireReply:
        answer = _parsed(_CompletionAnswer, body)
        choice = _only(answer.choices)
        scored_ids = [_token_id(token) for token in choice.logprobs.tokens] if choice.logprobs else []
        return WireReply(
            model=answer.model,
            prompt_tokens=answer.usage.prompt_tokens if answer.usage else None,
            token_ids=scored_ids if choice.token_ids is None else choice.token_ids,
            scored_ids=scored_ids,
            log_probs=choice.logprobs.token_logprobs if choice.logprobs else [],
            finish_reason=choice.finish_reason,
            spans=None,
        )


Answer = TypeVar("Answer", bound=BaseModel)
Choice = TypeVar("Choice")


def _parsed(kind: type[Answer], body: bytes) -> Answer:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "json_invalid":
            raise EngineFault(FaultKind.CUT_BODY, f"{len(body)} bytes that are no whole JSON") from None
        raise EngineFault(FaultKind.MALFORMED, f"{where} in the answer: {first['msg']}") from None


def _only(choices: list[Choice]) -> Choice:
    if len(choices) != 1:
        raise EngineFault(FaultKind.MALFORMED, f"{len(choices)} replies to one prompt")
    return choices[0]


def _token_id(token: str) -> int:
    """The id in `token_id:17`, which stands where the token's text would."""
    number = token.removeprefix(_TOKEN_ID)
    if number == token or not number.isdecimal():
        raise EngineFault(FaultKind.MALFORMED, "texts of tokens where their ids were asked for")
    return int(number)
