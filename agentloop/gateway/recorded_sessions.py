"""Sessions of a gateway without a run, recorded for later runs. The first request to a name opens its session, which
continues after a crash, and becomes a row once somebody ends it or it has been idle for long."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from starlette.applications import Starlette

from agentloop.gateway.agent_request import BadRequest
from agentloop.gateway.agent_sessions import AgentSession, Ask, Policy, forgotten
from agentloop.gateway.endpoints import check_key
from agentloop.gateway.node_writer import NodeWriter
from context.messages import content_hash, to_template
from context.tokens.session_nodes import Node, conversation_of
from context.tokens.session_segments import segments_of
from replay.errors import ReplayError, SessionForgotten
from replay.records import StopReason, TaskRecord, Trajectory, TrajectoryRecord, group_of
from replay.storage.sessions import OpenSession
from replay.store import ReplayStore

ENVIRONMENT = "gateway"
_NAME = re.compile(r"[A-Za-z0-9._:~@+-]{1,128}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """Where sessions are stored, and what answers their requests."""

    store: ReplayStore
    run: str
    policy: Policy
    ask: Ask
    by_text: bool
    """True: another model answers by text, without log-probs."""
    temperature: float
    """The temperature at which replies are sampled."""

    def row(self, id: str, nodes: tuple[Node, ...], reward: float | None) -> tuple[TaskRecord, Trajectory]:
        """Make a row of an ended session; its task is the messages before the first trained reply.

        Its advantage is the reward minus the mean reward of earlier attempts at the task, because later ones are not
        known yet. The advantage of another model's replies is the reward itself.
        """
        first = next(node.number for node in nodes if node.is_trained)
        opening = [to_template(message) for message in conversation_of(nodes, first)[:-1]]
        task = TaskRecord(content_hash([ENVIRONMENT, opening]), ENVIRONMENT, {"messages": opening})
        slot, mean = self.store.sessions.place_of_next_row(self.run, task.hash)
        baseline = 0.0 if self.by_text else mean
        replies = [node.messages[-1] for node in nodes if node.num_sampled]
        record = TrajectoryRecord(
            id=id,
            run=self.run,
            group=id,
            task=task.hash,
            iteration=0,
            slot=slot,
            member=0,
            source="gateway",
            reward=reward or 0.0,
            success=reward is not None and reward >= 1.0,  # as a run's rollout.success_reward
            advantage=0.0 if reward is None or baseline is None else reward - baseline,
            stop_reason=str(StopReason.UNREWARDED if reward is None else StopReason.ANSWERED),
            num_turns=len(replies),
            num_tool_calls=sum(len(reply.tool_calls) for reply in replies),
            temperature=self.temperature,
            top_p=1.0,
            top_k=0,
            logprobs_mode="none" if self.by_text else "full",
            environment=ENVIRONMENT,
            environment_version="1",
        )
        messages = tuple(message for node in nodes for message in node.messages)
        return task, Trajectory(record, segments_of(nodes, self.policy.renderer.authors), messages, nodes)


class RecordedSession(AgentSession):
    """A recorded session: one attempt at a task."""

    def __init__(self, sessions: RecordedSessions, opened: OpenSession, writer: NodeWriter, nodes: list[Node]) -> None:
        now, recording = datetime.fromisoformat(opened.opened_at), sessions.recording
        super().__init__(opened.id, recording.policy, recording.ask, now=now, writer=writer, nodes=nodes)
        self._end = sessions.end

    async def reward(self, rewards: Mapping[str, float], *, end: bool) -> None:
        if not end or rewards.keys() - {""}:
            raise BadRequest(
                400, 'The reward must be one for all, and come with the end: {"reward": 1.0, "end": true}.', "end"
            )
        if self.closed:
            raise _ended()
        await super().reward(rewards, end=end)
        if not await self._end(self):
            raise BadRequest(400, "The session must be one whose agent was given a reply to learn from, got none.")


class RecordedSessions:
    """All open sessions of a recording. Whoever has the key may open one under any name."""

    def __init__(self, recording: Recording, key: str | None, *, idle_s: float) -> None:
        """A session without a request for `idle_s` ends."""
        self.recording, self._key, self._idle_s = recording, key, idle_s
        self._stored = recording.store.sessions
        self._sessions: dict[str, asyncio.Future[RecordedSession]] = {}

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """The lifespan of the server: its start opens the stored sessions, and its end closes the writer."""
        self._writer = NodeWriter(self._stored)
        for opened in self._stored.opened(self.recording.run):
            self._sessions[opened.id] = asyncio.ensure_future(self._opened(opened.id))
        looking = asyncio.ensure_future(self._end_idle())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, *self._sessions.values(), return_exceptions=True)
            self._writer.close()

    async def check(self, episode: str, key: str) -> None:
        check_key(self._key, key, whose="the gateway's")

    async def authorize(self, episode: str, key: str) -> RecordedSession:
        await self.check(episode, key)
        if not _NAME.fullmatch(episode):
            raise BadRequest(404, "The session's name must have at most 128 letters, digits and . _ : ~ @ + -")
        id = f"{self.recording.run[:12]}:{episode}"
        opening = self._sessions.get(id) or asyncio.ensure_future(self._opened(id))
        self._sessions[id] = opening
        try:
            session = await asyncio.shield(opening)
        except Exception:
            self._sessions.pop(id, None)
            raise
        if session.closed:
            raise _ended()
        return session

    async def _opened(self, id: str) -> RecordedSession:
        new = OpenSession(id, self.recording.run, datetime.now().isoformat())

        def open_() -> tuple[OpenSession, list[Node]] | None:
            opened = self._stored.open(new)
            return None if opened is None else (opened, [] if opened is new else self._stored.nodes(id))

        opened = await self._writer.run_in_turn(open_)
        if opened is None:
            raise _ended()
        return RecordedSession(self, opened[0], self._writer, opened[1])

    async def end(self, session: RecordedSession) -> bool:
        """End a session and store its row; return whether it had a reply to store. Pending requests are refused."""
        session.closed = True
        try:
            row = partial(self._store, session.id, tuple(session.tree.nodes), session.rewards.get(""))
            is_row = await self._writer.run_in_turn(row)  # after the nodes that the session has still to store
        except SessionForgotten:
            del self._sessions[session.id]
            raise forgotten() from None
        except BaseException:
            session.closed = False  # it can be ended again
            raise
        del self._sessions[session.id]
        return is_row

    def _store(self, id: str, nodes: tuple[Node, ...], reward: float | None) -> bool:
        """Store a session as a row. Rows are stored one by one: slot and baseline follow from earlier rows."""
        if not any(node.is_trained for node in nodes):  # no reply was delivered that could be trained
            self._stored.end([id])
            return False
        task, row = self.recording.row(id, nodes, reward)
        self.recording.store.append([task], [group_of([row])], [row], ended=[id])
        return True

    async def _end_idle(self) -> None:
        while True:
            await asyncio.sleep(self._idle_s / 8)
            for opening in list(self._sessions.values()):
                try:
                    session = await asyncio.shield(opening)
                    if session.idle_s > self._idle_s and not session.closed:
                        await self.end(session)
                except (ReplayError, BadRequest) as error:
                    _log.warning("an idle session was not ended: %s", error)


def _ended() -> BadRequest:
    return BadRequest(403, "The session must be one that is under way, got one that has ended: take another name.")
