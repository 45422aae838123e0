"""A server that speaks as OpenEnv 0.10 does: its schema, and a session for each WebSocket."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.fakes.scripted_http import running

SCHEMA = {
    "action": {
        "type": "object",
        "title": "GuessAction",
        "description": "Guess the\n    number.",
        "additionalProperties": False,
        "properties": {
            "metadata": {"type": "object", "additionalProperties": True},
            "number": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["number"],
    }
}


class GuessServer:
    """Sessions in which a number is to be guessed; at 7 the server hangs up, at 8 it fails, at 9 it says too much."""

    def __init__(self, *, capacity: int = 100) -> None:
        self.capacity = capacity
        self.open = 0
        """Sessions."""

    async def schema(self, request: Request) -> JSONResponse:
        return JSONResponse(SCHEMA)

    async def session(self, websocket: WebSocket) -> None:
        await websocket.accept()
        if self.open == self.capacity:
            text = f"Server at capacity: {self.open}/{self.capacity} sessions active"
            await websocket.send_text(_error(text, "CAPACITY_REACHED"))
            await websocket.close()
            return
        self.open += 1
        with suppress(WebSocketDisconnect):
            await self._serve(websocket)
        self.open -= 1

    async def _serve(self, websocket: WebSocket) -> None:
        secret = 0
        while (message := json.loads(await websocket.receive_text()))["type"] != "close":
            if message["type"] == "reset":
                secret = message["data"].get("secret", random.Random(message["data"].get("seed")).randrange(5))
                await websocket.send_text(_observation(f"A number below {secret + 5}.", None, done=False))
                continue
            number = int(message["data"]["number"])  # as the data classes of OpenEnv read it
            if number == 7:
                break
            if number == 8:
                await websocket.send_text(_error("no such door", "EXECUTION_ERROR"))
            elif number == 9:
                await websocket.send_text(_observation("x" * (9 << 20), 0.0, done=False))
            else:
                right = number == secret
                await websocket.send_text(_observation("right" if right else "wrong", float(right) - 0.25, done=right))
        await websocket.close()


def _observation(text: str, reward: float | None, *, done: bool) -> str:
    observation: dict[str, Any] = {"text": text, "metadata": {"secret": True}}
    return json.dumps({"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}})


def _error(text: str, code: str) -> str:
    return json.dumps({"type": "error", "data": {"message": text, "code": code}})


@contextmanager
def served(guess: GuessServer) -> Iterator[str]:
    """Its address while it runs, in a thread."""
    app = Starlette(routes=[Route("/schema", guess.schema), WebSocketRoute("/ws", guess.session)])
    with running(uvicorn.Server(uvicorn.Config(app, ws="wsproto", log_level="critical"))) as port:
        yield f"http://127.0.0.1:{port}"
