"""Servers in threads of the tests; one that answers each path as a test has written down, and remembers what it was
asked.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


@contextmanager
def running(server: uvicorn.Server, *, port: int = 0) -> Iterator[int]:
    """Its port of 127.0.0.1 (0: a free one) while it runs, until the end of the block."""
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server never began to listen"
        time.sleep(0.002)
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
        listening.close()


class ScriptedServer:
    """`answers` has a status and a value for each path, or a function of the body that gives both; others are 404.

    Bytes are sent as they are, other values as JSON. A value may be a function of the body, or an iterator of parts
    that may never end.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any] | Callable[[Any], tuple[int, Any]]] = {}
        self.silent: set[str] = set()
        """Paths that are never answered."""
        self.asked: list[tuple[str, Any]] = []
        """Paths with their queries, and bodies."""
        self.keys: set[str | None] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    async def answer(self, request: Request) -> Response:
        body, path = await request.body(), request.url.path
        self.asked.append((f"{path}?{request.url.query}".rstrip("?"), json.loads(body) if body else None))
        self.keys.add(request.headers.get("Authorization"))
        while path in self.silent and not await request.is_disconnected():
            await asyncio.sleep(0.01)
        answer = self.answers.get(path, (404, {"error": "Not Found"}))
        status, value = answer(self.asked[-1][1]) if callable(answer) else answer
        if callable(value):
            value = value(self.asked[-1][1])
        if isinstance(value, AsyncIterator):
            return StreamingResponse(value, status)
        return Response(value if isinstance(value, bytes) else json.dumps(value), status, media_type="application/json")


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    app = Starlette(routes=[Route("/{path:path}", scripted.answer, methods=["GET", "POST"])])
    with running(uvicorn.Server(uvicorn.Config(app, log_level="critical"))) as scripted.port:
        yield scripted
