"""A server that answers each path as a test has written down, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedServer(ThreadingHTTPServer):
    """`answers` has a status and a JSON value for each path; any other path is 404."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.answers: dict[str, tuple[int, Any]] = {}
        self.silent: set[str] = set()
        """Paths that are never answered."""
        self.asked: list[tuple[str, Any]] = []
        """Paths with their queries, and bodies."""
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


class _Answers(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(json.loads(body) if body else None)

    def _answer(self, body: Any) -> None:
        self.server.asked.append((self.path, body))
        self.server.keys.add(self.headers.get("Authorization"))
        if self.path in self.server.silent:
            # Until the one who asks has gone.
            self.rfile.read(1)
            return
        status, value = self.server.answers.get(self.path.partition("?")[0], (404, {"error": "Not Found"}))
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
