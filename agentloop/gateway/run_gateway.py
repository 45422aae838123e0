"""The gateway of a run, in which the policy answers agents' requests; and the HTTP server of every gateway."""

from __future__ import annotations

import asyncio
import secrets
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp

from agentloop.config.sections.rollout import GatewaySection
from agentloop.errors import UserError
from agentloop.gateway.agent_request import AgentRequest, BadRequest
from agentloop.gateway.agent_sessions import AgentSession, Ask, Policy
from agentloop.gateway.endpoints import check_key, create_app
from agentloop.records import Completion
from context.conversation_tree import Prompt
from context.tokens.session_nodes import Node
from replay.pages.guard import LOOPBACK, allow_own_names
from replay.pages.serve import address_of, bound_socket, quiet_server

_Ask = Callable[[int, tuple[str, ...], Sequence[int], int], Coroutine[Any, Any, Completion]]
_IDLE_SECONDS = 600
"""Seconds that an unused connection stays open. Closing it while the agent sends a request would lose that request."""


class OpenedSession(AgentSession):
    """One episode of an agent, which sends its requests to `url` with `key`."""

    def __init__(self, gateway: RunGateway, ask: Ask) -> None:
        super().__init__(uuid.uuid4().hex, gateway.policy, ask, now=datetime.now())
        self.url, self.key = f"{gateway.url}/e/{self.id}", secrets.token_hex(32)
        self.local_url = f"{gateway.local_url}/e/{self.id}"
        self._open = gateway.opened

    def close(self) -> tuple[Node, ...]:
        """Close the session, which then answers no more; return its nodes."""
        self._open.pop(self.id, None)
        self.closed = True
        return tuple(self.tree.nodes)


class RunGateway:
    """The sessions of this process's agents."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.url, self.local_url = policy, "", ""
        self.opened: dict[str, OpenedSession] = {}
        """The open sessions by their ids."""

    def open(self, ask: _Ask) -> OpenedSession:
        """Open a session whose replies come from `ask`, which runs in the current event loop."""
        playing = asyncio.get_running_loop()

        async def ask_there(request: AgentRequest, number: int, prompt: Prompt, most: int) -> Completion:
            asked = ask(number, request.stop, prompt.ids, most)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, playing))

        session = OpenedSession(self, ask_there)
        self.opened[session.id] = session
        return session

    async def check(self, episode: str, key: str) -> None:
        await self.authorize(episode, key)

    async def authorize(self, episode: str, key: str) -> OpenedSession:
        session = self.opened.get(episode)
        if session is None:
            raise BadRequest(403, "The episode must be one that is under way, got one that has ended.")
        check_key(session.key, key, whose="this episode's")
        return session


@contextmanager
def run_gateway(section: GatewaySection, policy: Policy, *further: BaseRoute) -> Iterator[RunGateway]:
    """Run the gateway, with the `further` routes, within the block. Raises UserError if it can't listen."""
    gateway = RunGateway(policy)
    app = Starlette(routes=[*further, Mount("/", create_app(gateway))])
    with serving(app, host=section.host, port=section.port, public_url=section.public_url) as gateway.local_url:
        gateway.url = section.public_url or gateway.local_url
        yield gateway


@contextmanager
def serving(app: ASGIApp, *, host: str, port: int, public_url: str | None = None) -> Iterator[str]:
    """Serve the app within the block, which receives its URL; port 0 is any free port.

    On a loopback address it answers only to this machine's names and the name in `public_url`. At the end of the block,
    open requests have the seconds of `quiet_server` to be answered in.
    """
    if host in LOOPBACK:
        app = allow_own_names(app, *filter(None, [urlsplit(public_url or "").hostname]))
    try:
        listening = bound_socket(host, port)
    except OSError as problem:
        raise UserError(
            f"gateway.host and gateway.port must be free to listen on, got {problem} for {host} port {port}. "
            "Set gateway.port to 0 for any free port."
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
