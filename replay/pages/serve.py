"""Serves the inspector: listens on a port, prints the address, and opens a browser."""

import gc
import os
import socket
import sys
import threading
import webbrowser
from urllib.parse import quote

import uvicorn
from starlette.types import ASGIApp

from replay.errors import ReplayError
from replay.pages.guard import LOOPBACK, TOKEN

PORT = 7717
_PORTS_TRIED = 20
_SHORTEST_TOKEN = 16


def serve(app: ASGIApp, shown: str, *, host: str, port: int | None, token: str | None, browser: bool) -> None:
    """Serve an app until it is interrupted. `shown` names its contents. `port` None: the first free port from 7717."""
    listening = listen(host, port)
    address = address_of(listening, token)
    print(f"{shown} is shown at {address}", flush=True)
    print("Ctrl-C ends it.", flush=True)
    if browser and _has_screen():
        threading.Timer(0.3, webbrowser.open, [address]).start()
    server = quiet_server(app)
    # Objects that exist now are exempt from garbage collection, which delayed some requests by 50 ms.
    gc.collect()
    gc.freeze()
    server.run(sockets=[listening])


def quiet_server(app: ASGIApp) -> uvicorn.Server:
    """Make a server that prints only errors."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        # Addresses may hold the token and searched texts, which must not be logged.
        access_log=False,
        server_header=False,
        # There is no proxy whose headers could be trusted.
        proxy_headers=False,
        # The parser is fixed, so that refusals do not depend on the packages that are installed.
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)


def check_token(host: str, token: str | None) -> None:
    if token is None and host not in LOOPBACK:
        raise ReplayError(
            f"--host must be a loopback address without --token, got {host}. Everybody who reaches it could read every "
            "trajectory. Give --token, or forward a port: ssh -L 7717:localhost:7717 MACHINE"
        )
    if token is not None and len(token) < _SHORTEST_TOKEN:
        raise ReplayError(
            f"--token must have at least {_SHORTEST_TOKEN} characters, got {len(token)}. Use a longer one, or: auto"
        )
    if token is not None and not (token.isascii() and token.isprintable()):
        raise ReplayError("--token must be of printable ASCII characters, got others. Use such characters, or: auto")


def listen(host: str, port: int | None) -> socket.socket:
    wanted = range(PORT, PORT + _PORTS_TRIED) if port is None else [port]
    problem: OSError | None = None
    for number in wanted:
        try:
            return bound_socket(host, number)
        except OSError as error:
            problem = error
    raise ReplayError(
        f"--host and --port must be free to listen on, got {problem} for {host} port {wanted[-1]}. "
        "Use --port 0 for any free port."
    ) from problem


def bound_socket(host: str, port: int) -> socket.socket:
    """Listen on a port, even if it was released a moment ago. The host `::` includes 0.0.0.0."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    listening = socket.create_server(where, family=family, backlog=128, dualstack_ipv6=both)
    # Accepted connections inherit this option. Without it, a body is sent only after the client has acknowledged the
    # headers, some 40 ms later. asyncio sets it only on sockets that were made with the protocol's number.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def address_of(listening: socket.socket, token: str | None) -> str:
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}/" + (f"?{TOKEN}={quote(token, safe='')}" if token else "")


def _has_screen() -> bool:
    """Whether there is a screen. Without one, Python would open a text browser in this terminal."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
