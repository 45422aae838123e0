"""The gateway of a run: agents that it starts ask its policy, and end with it."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import lru_cache

from agentloop.config import RunConfig
from agentloop.gateway.endpoints import create_app
from agentloop.gateway.server_thread import serving
from agentloop.gateway.sessions import AgentSession, AgentSessions, Policy, Tools
from agentloop.records import Completion
from agentloop.rollouts.actors import Actors, make_parser
from agentloop.rollouts.episodes.agent_program import AgentAddress
from agentloop.rollouts.episodes.episode import AskAny
from context import ReplyParser
from context.messages import canonical_json
from context.tokens.session_nodes import Node

_MOST_PARSERS = 64


class OpenedSession:
    """One episode of an agent: see `OpenedAgent`."""

    def __init__(self, sessions: AgentSessions, session: AgentSession, url: str) -> None:
        self._sessions, self._session = sessions, session
        self.address = AgentAddress(f"{url}/e/{session.id}", sessions.add(session))
        self.ended = session.ended

    @property
    def rewards(self) -> Mapping[str, float]:
        return self._session.rewards

    @property
    def entropies(self) -> Sequence[float]:
        return self._session.entropies

    @property
    def problem(self) -> str | None:
        return self._session.problem

    def close(self) -> tuple[Node, ...]:
        self._sessions.remove(self._session)
        return tuple(self._session.tree.nodes)


class RunGateway:
    """Opens sessions; see `AgentGateway`."""

    def __init__(self, sessions: AgentSessions, policy: Policy, url: str) -> None:
        self._sessions, self._policy, self._url = sessions, policy, url

    def open(self, ask: AskAny) -> OpenedSession:
        playing = asyncio.get_running_loop()

        async def asked(line: int, prompt_ids: Sequence[int], most: int) -> Completion:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(line, prompt_ids, most), playing))

        session = AgentSession(uuid.uuid4().hex, self._policy, asked, now=datetime.now())
        return OpenedSession(self._sessions, session, self._url)


@contextmanager
def with_gateway(actors: Actors, config: RunConfig) -> Iterator[Actors]:
    """The actors with what their agents ask, where there are agents. Raises UserError where it can't listen."""
    if not any(factory.agent for factory in actors.environments.all):
        yield actors
        return
    section, sessions = config.gateway, AgentSessions()
    with serving(create_app(sessions), host=section.host, port=section.port) as port:
        url = section.public_url or f"http://{section.host}:{port}"
        yield replace(actors, gateway=RunGateway(sessions, policy_of(config, actors), url))


def policy_of(config: RunConfig, actors: Actors) -> Policy:
    """What a run's sessions are rendered, read and limited by."""

    @lru_cache(_MOST_PARSERS)
    def made(tools: str) -> ReplyParser:
        return make_parser(config.context.parser, actors.renderer.template, tools=json.loads(tools))

    def parser(tools: Tools) -> ReplyParser:
        return made(canonical_json(list(tools)))

    limits = (config.context.max_tokens, config.rollout.max_tokens_per_turn)
    return Policy(actors.renderer, parser, actors.control, *limits)
