"""Sessions behind a gateway that give what a test has written down, and remember what they were asked."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agentloop.gateway.agent_request import AgentReply, AgentRequest
from agentloop.gateway.endpoints import PING_SECONDS, check_key, create_app
from agentloop.gateway.run_gateway import serving
from context import Message, ToolCall

EPISODE = "quarry-1"
CALL = ToolCall("look", {"depth": 2}, "call_1_0")


def said(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message("assistant", content, "llm", calls, reasoning=reasoning)


@dataclass
class ScriptedSession:
    says: Message | Exception = field(default_factory=lambda: said("A stone."))
    cut: bool = False
    """True: its replies have reached their limit."""
    requests: list[AgentRequest] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    rewards: list[tuple[dict[str, float], bool]] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    stored: threading.Event = field(default_factory=threading.Event)
    free: threading.Event = field(default_factory=threading.Event)
    """Replies wait until it is set."""
    blocks: bool = False
    """True: they wait on the event loop, which notices nothing meanwhile."""

    def __post_init__(self) -> None:
        self.free.set()

    async def reply(self, request: AgentRequest, gone: asyncio.Future[Any]) -> AgentReply:
        self.requests.append(request)
        number = len(self.requests)
        self.log.append(f"asked {number}")
        self.asked.set()
        if self.blocks:
            self.free.wait()
        elif not self.free.is_set():
            await asyncio.to_thread(self.free.wait)
        if isinstance(self.says, Exception):
            raise self.says
        self.log.append(f"stored {number}")
        self.stored.set()
        finish = "length" if self.cut else "tool_calls" if self.says.tool_calls else "stop"
        return AgentReply(f"1_{number}", self.says, finish, 11, 7, 1_790_000_000, cached_tokens=4)

    def find_reply(self, id: str) -> None:
        """Find nothing: it remembers no reply."""

    def mark_delivered(self, reply: AgentReply) -> None:
        self.log.append(f"delivered {reply.id.rpartition('_')[2]}")

    async def count_tokens(self, request: AgentRequest) -> int:
        self.requests.append(request)
        return 23

    async def reward(self, rewards: Mapping[str, float], *, end: bool) -> None:
        self.rewards.append((dict(rewards), end))


class ScriptedSessions:
    """One session, whatever the episode is called."""

    def __init__(self) -> None:
        self.session = ScriptedSession()

    def key(self, episode: str = EPISODE) -> str:
        return f"a-key-of-{episode}"

    async def check(self, episode: str, key: str) -> None:
        check_key(self.key(episode), key, whose="this episode's")

    async def authorize(self, episode: str, key: str) -> ScriptedSession:
        await self.check(episode, key)
        return self.session


@dataclass
class Gateway:
    address: str
    sessions: ScriptedSessions

    @property
    def session(self) -> ScriptedSession:
        return self.sessions.session

    @property
    def url(self) -> str:
        return f"{self.address}/e/{EPISODE}"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.sessions.key()}"}


@contextmanager
def scripted_gateway(*, ping_seconds: float = PING_SECONDS) -> Iterator[Gateway]:
    sessions = ScriptedSessions()
    with serving(create_app(sessions, ping_seconds=ping_seconds), host="127.0.0.1", port=0) as url:
        try:
            yield Gateway(url, sessions)
        finally:
            sessions.session.free.set()


def plain(message: Message) -> Message:
    """A message without its author, whom protocols do not know."""
    return replace(message, author="llm", reasoning=message.reasoning or None)
