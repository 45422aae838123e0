"""An inspector that really listens, in a thread of the tests, and requests as they go over the wire."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from replay.pages.serve import quiet_server


@dataclass(frozen=True)
class Response:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def header(self, name: str) -> str | None:
        """The only one of that name."""
        found = [value for key, value in self.headers if key == name.lower()]
        assert len(found) <= 1, found
        return found[0] if found else None


@dataclass(frozen=True)
class Served:
    port: int

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"http://{self.host}"

    def ask(
        self,
        target: str,
        *,
        method: str = "GET",
        hosts: Sequence[str] | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> Response:
        """One request, its target and its headers exactly as given; `hosts`: its Host headers, ours if left out."""
        lines = [f"{method} {target} HTTP/1.1"]
        lines += [f"Host: {host}" for host in ([self.host] if hosts is None else hosts)]
        lines += [f"{name}: {value}" for name, value in headers]
        return self.send("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1"))

    def send(self, request: bytes) -> Response:
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(request)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        head, _, body = b"".join(parts).partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = tuple((name.lower(), value.strip()) for name, _, value in pairs)
        if ("transfer-encoding", "chunked") in headers:
            body = _unchunked(body)
        return Response(int(first.split()[1]), headers, body)


@contextmanager
def served(app: ASGIApp) -> Iterator[Served]:
    """On a free port of 127.0.0.1, until the end of the block."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    server = quiet_server(app)
    thread = threading.Thread(target=_run, args=(server, listening), daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the inspector never began to listen"
        time.sleep(0.002)
    yield Served(listening.getsockname()[1])
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def _run(server: uvicorn.Server, listening: socket.socket) -> None:
    server.run(sockets=[listening])


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        whole, body = whole + rest[:length], rest[length + 2 :]
    return whole
