"""A server beside a program: in a thread of its own, with its own event loop."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp

from agentloop.errors import UserError
from replay.pages.serve import address_of, bound_socket, quiet_server

_IDLE_SECONDS = 600
"""An agent's connection outlives its tools: one that is closed just when the agent asks again loses the request."""


@contextmanager
def serving(app: ASGIApp, *, host: str, port: int) -> Iterator[str]:
    """Serve the app within the block, and say at which URL; port 0: any that is free.

    At its end, requests under way have the seconds of `quiet_server` to be answered in.
    """
    try:
        listening = bound_socket(host, port)
    except OSError as problem:
        raise UserError(
            f"gateway.host and gateway.port must be free to listen on, got {problem} for {host} port {port}. "
            "Set gateway.port to 0 for any."
        ) from problem
    server = quiet_server(app)
    server.config.timeout_keep_alive = _IDLE_SECONDS
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="gateway", daemon=True)
    thread.start()
    try:
        yield address_of(listening, None).removesuffix("/")
    finally:
        server.should_exit = True
        thread.join()
