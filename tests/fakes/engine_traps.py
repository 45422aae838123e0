"""What goes wrong with engines, each as a switch of the test server."""

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


class Refused(Exception):
    """An error comes back, or another `response`, in the place of an answer."""

    def __init__(self, code: int, message: str, response: Response | None = None) -> None:
        super().__init__(message)
        self.response = response or JSONResponse({"error": {"message": message, "code": code}}, code)


async def spoil(traps: Traps, request: Request) -> None:
    """Raises Refused in the ways that are set."""
    if traps.sprung(Trap.BUSY):
        raise Refused(429, "too many requests")
    if traps.sprung(Trap.SERVER_ERROR):
        raise Refused(500, "EngineCore encountered an issue.")
    if traps.sprung(Trap.PAGE):
        raise Refused(200, "page", Response("<html>It works!</html>", media_type="text/html"))
    if traps.sprung(Trap.SILENCE):
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        raise Refused(200, "nobody listens", Response())


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
