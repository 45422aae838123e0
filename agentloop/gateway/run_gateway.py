"""The gateway of a run: agents that it starts ask its policy, and end with it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount

from agentloop.config.sections.rollout import GatewaySection
from agentloop.gateway.agent_request import AgentRequest
from agentloop.gateway.agent_sessions import AgentSession, AgentSessions, Policy
from agentloop.gateway.endpoints import create_app
from agentloop.gateway.server_thread import serving
from agentloop.records import Completion
from context.tokens.session_nodes import Node

_Ask = Callable[[int, Sequence[int], int], Coroutine[Any, Any, Completion]]


class OpenedSession:
    """One episode of an agent."""

    def __init__(self, sessions: AgentSessions, session: AgentSession, url: str) -> None:
        self._sessions, self._session = sessions, session
        self.url, self.key = f"{url}/e/{session.id}", sessions.add(session)

    @property
    def ended(self) -> Future[None]:
        """Done once somebody has said that the episode is over."""
        return self._session.ended

    @property
    def rewards(self) -> Mapping[str, float]:
        """What was posted, by agent; the whole episode's under the empty name."""
        return self._session.rewards

    @property
    def entropies(self) -> Sequence[float]:
        """Nats, one per sampled token whose entropy the engine said."""
        return self._session.entropies

    @property
    def idle_s(self) -> float:
        """Seconds for which nothing was asked, or is to be answered."""
        return self._session.idle_s

    @property
    def problem(self) -> str | None:
        """Why the engine gave no reply, where it gave none."""
        return self._session.problem

    def close(self) -> tuple[Node, ...]:
        """It answers no more; what was asked of it."""
        self._sessions.remove(self._session)
        return tuple(self._session.tree.nodes)


class RunGateway:
    """Opens sessions of the agents of this process."""

    def __init__(self, sessions: AgentSessions, policy: Policy, url: str) -> None:
        self._sessions, self._policy, self.url = sessions, policy, url

    def open(self, ask: _Ask) -> OpenedSession:
        """A session whose replies `ask` gives, in the event loop that runs now."""
        playing = asyncio.get_running_loop()

        async def asked(_: AgentRequest, line: int, prompt_ids: Sequence[int], most: int) -> Completion:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(line, prompt_ids, most), playing))

        session = AgentSession(uuid.uuid4().hex, self._policy, asked, now=datetime.now())
        return OpenedSession(self._sessions, session, self.url)


@contextmanager
def run_gateway(section: GatewaySection, policy: Policy, *further: BaseRoute) -> Iterator[RunGateway]:
    """Listens within the block, to what is asked at `further` addresses too. Raises UserError where it can't."""
    sessions = AgentSessions()
    app = Starlette(routes=[*further, Mount("/", create_app(sessions))])
    with serving(app, host=section.host, port=section.port) as port:
        yield RunGateway(sessions, policy, section.public_url or f"http://{section.host}:{port}")
