"""Episodes of a run for agents that others start. An agent requests an episode, plays it at its own base URL, and posts
its reward; a worker does the rest."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentloop.config.sections.rollout import GatewaySection
from agentloop.environments import Task
from agentloop.gateway.agent_request import BadRequest
from agentloop.gateway.endpoints import check_key
from agentloop.gateway.http_json import openai_error
from agentloop.gateway.run_gateway import OpenedSession, RunGateway, run_gateway
from agentloop.rollouts.actors import agents_policy
from agentloop.rollouts.episodes.agent_episode import episode_of
from agentloop.rollouts.episodes.agent_program import AgentEnd
from agentloop.rollouts.episodes.episode import AskAny, Episode
from agentloop.runs.signals import StopRequest
from agentloop.workers.joined_run import JoinedRun, join_run
from agentloop.workers.worker import Worker
from replay.records import StopReason
from replay.storage.collecting.ticket_records import Claim

_MOST_AT_ONCE = 1024
_LOOK_S = 0.25
_LONGEST_WAIT_S = 20.0
"""Seconds that a request waits for a ticket; then its agent is told to ask again."""


class EpisodeDesk:
    """Hands episodes to waiting agents. Requests arrive in the server's thread; the worker's thread answers them."""

    def __init__(self, run: JoinedRun, key: str | None, *, idle_s: float) -> None:
        """`idle_s`: an agent without a request for so long has abandoned its episode."""
        self._tickets, self._authors = run.store.tickets, run.actors.authors
        self._key, self._idle_s, self._timeout_s = key, idle_s, run.config.rollout.episode_timeout_s
        self._judged = bool(run.config.reward.functions)
        self._askers: deque[Future[tuple[OpenedSession, Task]]] = deque()
        self.is_over = False
        self.gateway: RunGateway | None = None
        """The gateway at which agents play; set before the first episode."""

    @property
    def waiting(self) -> int:
        """The number of waiting agents that could begin an episode now."""
        return len(self._askers)

    async def ask(self, request: Request) -> Response:
        """Answer POST /episodes with `{"id": ..., "url": ..., "key": ..., "task": ...}`."""
        try:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            check_key(self._key, given, whose="the gateway's")
            return JSONResponse(await self._wait_for_episode(request))
        except BadRequest as bad:
            return JSONResponse(openai_error(bad), bad.status, {"retry-after": "1"})

    async def _wait_for_episode(self, request: Request) -> dict[str, Any]:
        asker = Future[tuple[OpenedSession, Task]]()
        self._askers.append(asker)
        given, until = asyncio.wrap_future(asker), time.monotonic() + _LONGEST_WAIT_S
        while not (self.is_over or given.done() or time.monotonic() > until or await request.is_disconnected()):
            await asyncio.wait([given], timeout=_LOOK_S)
        if given.done() and not given.cancelled():
            opened, task = given.result()
            if await request.is_disconnected():  # the closed session gives the ticket back
                opened.close()
            return {"id": opened.id, "url": opened.url, "key": opened.key, "task": dict(task.payload)}
        given.cancel()
        with suppress(ValueError):  # `_hand_over` has removed it already
            self._askers.remove(asker)
        if self.is_over:
            raise BadRequest(410, "The run must be one that goes on, got one that has ended.")
        raise BadRequest(503, "There is no free ticket of the run now. Ask again.")

    async def play(self, claim: Claim, task: Task, ask: AskAny) -> Episode:
        """Let the agent that has waited longest play the episode of a claim."""
        assert self.gateway is not None
        opened, stop_reason = self.gateway.open(ask), StopReason.ANSWERED
        try:
            over = asyncio.wrap_future(opened.ended)
            is_played = self._hand_over(opened, task)
            async with asyncio.timeout(self._timeout_s):
                while is_played and not (await asyncio.wait([over], timeout=_LOOK_S))[0]:
                    is_played = not opened.closed and opened.idle_s <= self._idle_s
        except TimeoutError:
            stop_reason = StopReason.OVERTIME
        finally:
            nodes = opened.close()
        if over.done():
            over.result()  # raises an error that must end the worker
        if not is_played:
            await asyncio.to_thread(self._tickets.give_back, [claim])
            raise asyncio.CancelledError  # as for a lost claim: the worker finds out when it extends its leases
        return episode_of(task, nodes, opened, AgentEnd(), stop_reason, authors=self._authors, judged=self._judged)

    def _hand_over(self, opened: OpenedSession, task: Task) -> bool:
        while self._askers:
            asker = self._askers.popleft()
            if asker.set_running_or_notify_cancel():
                asker.set_result((opened, task))
                return True
        return False


def give_episodes(
    run: Path, section: GatewaySection, *, key: str | None, idle_s: float, stop: StopRequest, say: Callable[[str], None]
) -> None:
    """Serve episodes until a signal comes; after the run's end there are none. Raises UserError where it can't join."""
    joined = join_run(run, wait_s=600.0, note=say)
    policy = agents_policy(joined.config, joined.actors.renderer)
    desk = EpisodeDesk(joined, key, idle_s=idle_s)
    tickets = Route("/episodes", desk.ask, methods=["POST"])
    with closing(joined.store), run_gateway(section, policy, tickets) as desk.gateway, stop.working():
        say(f"episodes of {run}: POST {desk.gateway.url}/episodes")
        Worker(joined, concurrency=_MOST_AT_ONCE, stop=stop, say=say, desk=desk).collect()
        desk.is_over = True
        while not stop.requested:
            time.sleep(_LOOK_S)
