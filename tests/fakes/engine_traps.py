"""What goes wrong with engines, each as a switch of the test server."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from enum import StrEnum
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send


class Trap(StrEnum):
    """Each spoils the next answers it is set for."""

    BUSY = "busy"
    SERVER_ERROR = "server_error"
    SILENCE = "silence"
    CUT_BODY = "cut_body"
    PAGE = "page"
    """Another program's page, with status 200."""
    ABORT = "abort"
    PROMPT_TOKENS = "prompt_tokens"
    FEWER_LOG_PROBS = "fewer_log_probs"
    NO_LOG_PROBS = "no_log_probs"
    OTHER_IDS = "other_ids"
    NAN = "nan"
    MINUS_INFINITY = "minus_infinity"
    POSITIVE = "positive"
    UNKNOWN_LOG_PROB = "unknown_log_prob"
    """-9999, which vLLM sends for NaN."""
    VOCABULARY = "vocabulary"
    MAX_TOKENS_CUT = "max_tokens_cut"
    TOO_MANY_TOKENS = "too_many_tokens"
    OVER_STOP = "over_stop"
    """Goes on past the stop token."""
    OWN_STOP = "own_stop"
    """Stops where nobody asked it to."""
    HOLE = "hole"
    OVERLAP = "overlap"
    SHORT_SPANS = "short_spans"
    NO_SPANS = "no_spans"
    UNKNOWN_VERSION = "unknown_version"
    OTHER_MODEL = "other_model"


class Traps:
    """Which traps are set, and for how many answers more."""

    def __init__(self) -> None:
        self._left: Counter[Trap] = Counter()
        self.retry_after = "0"

    def set(self, trap: Trap, times: int = 1_000_000) -> None:
        self._left[trap] = times

    def clear(self) -> None:
        self._left.clear()

    def is_set(self, trap: Trap) -> bool:
        return self._left[trap] > 0

    def sprung(self, trap: Trap) -> bool:
        """Whether it spoils this answer; one answer fewer is left to it."""
        if self._left[trap] <= 0:
            return False
        self._left[trap] -= 1
        return True


async def spoilt_exchange(traps: Traps, request: Request) -> Response | None:
    """What comes back in the place of an answer."""
    if traps.sprung(Trap.BUSY):
        return JSONResponse(_error("too many requests", 429), 429, headers={"Retry-After": traps.retry_after})
    if traps.sprung(Trap.SERVER_ERROR):
        return JSONResponse(_error("EngineCore encountered an issue.", 500), 500)
    if traps.sprung(Trap.PAGE):
        return Response("<html>It works!</html>", media_type="text/html")
    if traps.sprung(Trap.SILENCE):
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        return Response()
    return None


def _error(message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "error", "param": None, "code": code}}


def spoil_generate(traps: Traps, answer: dict[str, Any], vocabulary: int) -> None:
    """Make an answer of `/inference/v1/generate` wrong in the ways that are set."""
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    _spoil_whole(traps, answer, choice)
    if traps.sprung(Trap.FEWER_LOG_PROBS):
        content.pop()
    if traps.sprung(Trap.NO_LOG_PROBS):
        choice["logprobs"] = None
    if traps.sprung(Trap.OTHER_IDS):
        content[-1]["token_id"] = (content[-1]["token_id"] + 1) % vocabulary
    for trap, value in _LOG_PROBS.items():
        if traps.sprung(trap):
            content[-1]["logprob"] = value
    if traps.sprung(Trap.VOCABULARY):
        choice["token_ids"][0] = content[0]["token_id"] = vocabulary
    _spoil_spans(traps, choice)


def spoil_completion(traps: Traps, answer: dict[str, Any], vocabulary: int) -> None:
    """Make an answer of `/v1/completions` wrong in the ways that are set; it has no spans."""
    choice = answer["choices"][0]
    scored = choice["logprobs"]
    _spoil_whole(traps, answer, choice)
    if traps.sprung(Trap.FEWER_LOG_PROBS):
        scored["token_logprobs"].pop()
    if traps.sprung(Trap.NO_LOG_PROBS):
        choice["logprobs"] = None
    if traps.sprung(Trap.OTHER_IDS):
        scored["tokens"][-1] = f"token_id:{(choice['token_ids'][-1] + 1) % vocabulary}"
    for trap, value in _LOG_PROBS.items():
        if traps.sprung(trap):
            scored["token_logprobs"][-1] = value
    if traps.sprung(Trap.VOCABULARY):
        choice["token_ids"][0] = vocabulary
        scored["tokens"][0] = f"token_id:{vocabulary}"


_LOG_PROBS = {
    Trap.NAN: math.nan,
    Trap.MINUS_INFINITY: -math.inf,
    Trap.POSITIVE: 0.25,
    Trap.UNKNOWN_LOG_PROB: -9999.0,
}


def _spoil_whole(traps: Traps, answer: dict[str, Any], choice: dict[str, Any]) -> None:
    if traps.sprung(Trap.PROMPT_TOKENS):
        answer["usage"]["prompt_tokens"] += 1
    if traps.sprung(Trap.OTHER_MODEL):
        answer["model"] = "another"
    if traps.sprung(Trap.ABORT):
        choice["finish_reason"] = "abort"
    if traps.sprung(Trap.OWN_STOP):
        choice["finish_reason"] = "stop"


def _spoil_spans(traps: Traps, choice: dict[str, Any]) -> None:
    n, label = len(choice["token_ids"]), choice["weight_versions"][0]["version"]
    spans = {
        Trap.HOLE: [(label, 0, 1), (label, 2, n)],
        Trap.OVERLAP: [(label, 0, 2), (label, 1, n)],
        Trap.SHORT_SPANS: [(label, 0, n - 1)],
        Trap.UNKNOWN_VERSION: [(label, 0, 1), ("default", 1, n)],
    }
    for trap, found in spans.items():
        if traps.sprung(trap):
            choice["weight_versions"] = [{"version": v, "start": start, "end": end} for v, start, end in found]
    if traps.sprung(Trap.NO_SPANS):
        choice["weight_versions"] = None


class Cut(Response):
    """Its body ends in the middle, and the connection with it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": bytes(self.body)[: len(self.body) // 2], "more_body": True})


def json_answer(traps: Traps, content: dict[str, Any]) -> Response:
    """NaN and infinity as Python writes them."""
    body = json.dumps(content)
    return (Cut if traps.sprung(Trap.CUT_BODY) else Response)(body, media_type="application/json")
