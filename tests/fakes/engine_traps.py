"""What goes wrong with engines, each as a switch of the test server."""

from __future__ import annotations

import asyncio
import json
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
        self._left[trap] -= (sprung := self.is_set(trap))
        return sprung


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


class Cut(Response):
    """Its body ends in the middle, and the connection with it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": bytes(self.body)[: len(self.body) // 2], "more_body": True})


def json_answer(traps: Traps, content: dict[str, Any]) -> Response:
    """The answer, spoilt in the ways that are set; NaN and infinity as Python writes them."""
    content["usage"]["prompt_tokens"] += traps.sprung(Trap.PROMPT_TOKENS)
    if traps.sprung(Trap.ABORT):
        content["choices"][0]["finish_reason"] = "abort"
    return (Cut if traps.sprung(Trap.CUT_BODY) else Response)(json.dumps(content), media_type="application/json")
