"""Listens, tells the address, and opens a browser."""

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
    """Serve an app that shows `shown` until it is interrupted. `port` None: the usual one, or the next that is free."""
    listening = listen(host, port)
    address = address_of(listening, token)
    print(f"{shown} is shown at {address}", flush=True)
    print("Ctrl-C ends it.", flush=True)
    if browser and _has_screen():
        threading.Timer(0.3, webbrowser.open, [address]).start()
    server = quiet_server(app)
    # What is there by now stays: to look for garbage in it took 50 ms, now and then, of somebody's request.
    gc.collect()
    gc.freeze()
    server.run(sockets=[listening])


def quiet_server(app: ASGIApp) -> uvicorn.Server:
    """Says only what went wrong."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        # Addresses may hold the token, and what people search for.
        access_log=False,
        server_header=False,
        # Nothing stands before it whose word about a request would count.
        proxy_headers=False,
        # What is refused must not depend on which parsers other packages have brought.
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
            f"--host must be a loopback address without --token, got {host}. Whoever reaches it could read every "
            "trajectory: give --token, or forward a port: ssh -L 7717:localhost:7717 MACHINE"
        )
    if token is not None and len(token) < _SHORTEST_TOKEN:
        raise ReplayError(f"--token must have at least {_SHORTEST_TOKEN} characters, got {len(token)}. Or give: auto")
    if token is not None and not (token.isascii() and token.isprintable()):
        raise ReplayError("--token must be of printable ASCII characters, which a cookie can hold. Or give: auto")


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
        "Give --port 0 for any."
    ) from problem


def bound_socket(host: str, port: int) -> socket.socket:
    """A port that was left a moment ago can be taken again at once; `::` is also listened to as 0.0.0.0."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    listening = socket.create_server(where, family=family, backlog=128, dualstack_ipv6=both)
    # Accepted connections inherit it. Without it a body waits some 40 ms behind its headers for the client's
    # acknowledgement; asyncio sets it only on sockets that were made with the protocol's number.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def address_of(listening: socket.socket, token: str | None) -> str:
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}/" + (f"?{TOKEN}={quote(token, safe='')}" if token else "")


def _has_screen() -> bool:
    """Without one, Python would open a browser in this terminal."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
