"""The gateway of a run: agents that it starts ask its policy, and end with it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount

from agentloop.config.sections.rollout import GatewaySection
from agentloop.gateway.agent_request import AgentRequest, BadRequest
from agentloop.gateway.agent_sessions import AgentSession, Ask, Policy
from agentloop.gateway.endpoints import create_app
from agentloop.gateway.episode_keys import EpisodeKeys
from agentloop.gateway.server_thread import serving
from agentloop.records import Completion
from context.tokens.session_nodes import Node

_Ask = Callable[[int, Sequence[int], int], Coroutine[Any, Any, Completion]]


class OpenedSession(AgentSession):
    """One episode of an agent, which asks at `url` with `key`."""

    def __init__(self, gateway: RunGateway, ask: Ask) -> None:
        super().__init__(uuid.uuid4().hex, gateway.policy, ask, now=datetime.now())
        self.url, self.key = f"{gateway.url}/e/{self.id}", gateway.keys.key(self.id)
        self.local_url = f"{gateway.local_url}/e/{self.id}"
        self._open = gateway.opened

    def close(self) -> tuple[Node, ...]:
        """It answers no more; what was asked of it."""
        self._open.pop(self.id, None)
        self.closed = True
        return tuple(self.tree.nodes)


class RunGateway:
    """The sessions of the agents of this process."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.url, self.local_url = policy, "", ""
        self.keys = EpisodeKeys()
        self.opened: dict[str, OpenedSession] = {}
        """Those that are answered, by their ids."""

    def open(self, ask: _Ask) -> OpenedSession:
        """A session whose replies `ask` gives, in the event loop that runs now."""
        playing = asyncio.get_running_loop()

        async def asked(_: AgentRequest, line: int, prompt_ids: Sequence[int], most: int) -> Completion:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(line, prompt_ids, most), playing))

        session = OpenedSession(self, asked)
        self.opened[session.id] = session
        return session

    async def authorize(self, episode: str, key: str) -> OpenedSession:
        self.keys.check(episode, key)
        if episode not in self.opened:
            raise BadRequest(403, "The episode must be one that is under way, got one that has ended.")
        return self.opened[episode]


@contextmanager
def run_gateway(section: GatewaySection, policy: Policy, *further: BaseRoute) -> Iterator[RunGateway]:
    """Listens within the block, to what is asked at `further` addresses too. Raises UserError where it can't."""
    gateway = RunGateway(policy)
    app = Starlette(routes=[*further, Mount("/", create_app(gateway))])
    with serving(app, host=section.host, port=section.port) as gateway.local_url:
        gateway.url = section.public_url or gateway.local_url
        yield gateway
