"""A simulated user that breaks costs its episode alone, sees the dialogue from its side, and is never trained."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from agentloop import Environment, Message, SimulatedUser, Task
from agentloop.config import RunConfig
from agentloop.config.sections.context import make_strategy
from agentloop.environments import load_environment
from agentloop.errors import UserError
from agentloop.rollouts.trajectories import Collected
from context import ToolCall, default_authors, loss_mask
from tests.agentloop.rollouts.collecting import collect
from tests.fakes.scripted import CHATML, scripted_actors
from tests.fakes.scripted_http import ScriptedServer, scripted_server


class Kitchen(Environment):
    def make_task(self, rng: random.Random) -> Task:
        return Task("Tea, please.", {"url": ""})

    def start(self, task: Task) -> None:
        self.user = SimulatedUser("You want tea.", model="m", max_tokens=16, **task.payload)

    async def respond(self, task: Task, messages: Sequence[Message]) -> str | None:
        assert self.user is not None
        return await self.user.respond(messages)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return 1.0


REPLIES = ["Which tea do you want?", "How hot?", "Here it is."]


def completion(text: Any, reason: str = "stop", tokens: float = 3) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return {"choices": [choice], "usage": {"completion_tokens": tokens}}


def good(asked: dict[str, Any]) -> dict[str, Any]:
    """A user who answers twice with half a letter, and is done then."""
    return completion("Thanks! ###STOP### " if "Here it is." in str(asked) else "Green.\ud800")


async def dying(_: Any) -> AsyncIterator[bytes]:
    yield b"{"
    raise ConnectionError


async def endless(_: Any) -> AsyncIterator[bytes]:
    while True:
        yield b" "
        await asyncio.sleep(0.01)


USERS: dict[str, tuple[int, Any, str]] = {
    "good": (200, good, ""),
    "cut": (200, completion("Green", "length"), "did not end within max_tokens=16"),
    "empty": (200, completion(" \n"), "said nothing"),
    "other": (200, {"choices": {}}, "sent no chat completion"),
    "endless_count": (200, completion("Hm", tokens=float("inf")), "sent no chat completion"),
    "nested": (200, b"[" * 100_000, "sent no JSON"),
    "failing": (500, "out of memory", 'answered with 500: "out of memory"'),
    "killed": (200, dying, "is away (RemoteProtocolError"),
    "silent": (200, "", "said nothing within 0.1 s"),
    "slow": (200, endless, "said nothing within 0.1 s"),
}
"""The status and answer of each user, and what the log says of the broken ones."""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as users:
        users.answers = {f"/{name}/chat/completions": (status, says) for name, (status, says, _) in USERS.items()}
        users.silent = {"/silent/chat/completions"}
        yield users


def played(*urls: str, **context: Any) -> Collected:
    """One episode for each user."""
    config = RunConfig.model_validate({"rollout": {"max_tokens_per_turn": 200}, "context": context})
    limits = {url: 0.1 if url.endswith(("silent", "slow")) else 60 for url in urls}
    tasks = [Task("Tea, please.", {"url": url, "timeout_s": limit}) for url, limit in limits.items()]
    strategy = make_strategy(config.context.strategy, config.context.options)
    actors = scripted_actors(load_environment(f"{__file__}:Kitchen", {}), [REPLIES] * len(urls), strategy=strategy)
    return collect(actors, [(task, 1) for task in tasks], config)


def test_broken_users_cost_an_episode_and_are_counted(server: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = played(*(f"{server.url}/{name}" for name in USERS))
    assert [(row.record.reward, row.record.stop_reason) for row in found.trajectories] == [(1.0, "answered")]
    assert all(says in caplog.text for _, _, says in USERS.values())
    metrics = found.metrics()
    # One user replied three times. Tokens are what servers counted, of the replies that were cut or empty, too.
    counts = {name: metrics[f"user/{name}"] for name in ("replies", "failures", "tokens")}
    assert counts == {"replies": 3, "failures": 9, "tokens": 9 + 6}
    assert metrics["rollout/not_judged"] == 9 and metrics["user/seconds"] > 0
    with pytest.raises(UserError, match="on at least one of 1 episodes, got none .*is away"):
        played("http://127.0.0.1:9/v1")


def test_a_user_sees_the_dialogue_from_its_side_without_rules_and_tools(server: ScriptedServer) -> None:
    said = (
        Message("system", "Never give tea away."),
        Message("user", "Tea, please."),
        Message("assistant", "I look.", tool_calls=(ToolCall("brew", {"tea": "green"}),)),
        Message("tool", "a pot of green", name="brew"),
        Message("assistant", "Here it is."),
    )
    user = SimulatedUser("You want tea.", url=f"{server.url}/good", model="m")
    assert asyncio.run(user.respond(said)) is None
    [(_, asked)] = server.asked
    (role, instructions), *shown = [(m["role"], m["content"]) for m in asked["messages"]]
    assert role == "system" and instructions.startswith("You want tea.")
    hello = ("user", "Hi! How can I help you today?"), ("assistant", "Tea, please.")
    assert shown == [*hello, ("user", "I look.\n\nHere it is.")]


@pytest.mark.parametrize("context", [{}, {"strategy": "sliding_window", "options": {"budget": 70}}])
def test_words_of_a_user_are_in_no_loss(server: ScriptedServer, context: dict[str, Any]) -> None:
    (row,) = played(f"{server.url}/good", **context).trajectories
    assert [said.content for said in row.messages if said.author == "user"] == ["Tea, please.", *["Green.\ud800"] * 2]
    assert len(row.segments) == (2 if context else 1)
    masks = [loss_mask(segment.tokens, default_authors()) for segment in row.segments]
    trained = [CHATML.codec.decode(s.tokens.token_ids[m].tolist()) for s, m in zip(row.segments, masks, strict=True)]
    assert "".join(trained) == "".join(f"{reply}<|im_end|>" for reply in REPLIES)
