"""One episode whose replies a person types."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, Task, ToolLimits, call_tool
from agentloop.environments.tools.worker_threads import WorkerThreads, run_coroutine
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.hooks import EpisodeHooks
from agentloop.rollouts.rewards import RewardScorer
from context.authors import LLM
from context.conversation_text import conversation_text
from context.messages import Message, ToolCall, plain_message

_CALLS = "/"
Show = Callable[[str], None]
Ask = Callable[[], str | None]
"""What the person typed; None: nothing comes any more."""


def play_by_hand(
    factory: EnvironmentFactory, task: Task, config: RunConfig, scorer: RewardScorer, *, show: Show, ask: Ask
) -> float | None:
    """The reward of the episode; None where the person left it without an answer."""
    played = run_coroutine(_play(factory, task, config, show, ask))
    return None if played is None else scorer.score([played]).episodes[0].environment_reward


async def _play(factory: EnvironmentFactory, task: Task, config: RunConfig, show: Show, ask: Ask) -> Episode | None:
    environment, threads = factory.create(), WorkerThreads(1)
    hooks = EpisodeHooks(environment, task, threads, config.rollout, advice="Mend it.")
    try:
        async with factory.connected(environment):
            try:
                return await _replied(hooks, show, ask)
            finally:
                problem = await hooks.close()
                if problem is not None:
                    show(f"{factory.where}.close failed: {problem}")
    finally:
        threads.close()


async def _replied(hooks: EpisodeHooks, show: Show, ask: Ask) -> Episode | None:
    limits = ToolLimits(hooks.limits.tool_timeout_s, hooks.limits.tool_output_chars)
    messages = list(hooks.task.messages())
    await hooks.start()
    show(conversation_text(map(plain_message, messages)))
    while (reply := _typed_reply(show, ask)) is not None:
        messages.append(reply)
        if not reply.tool_calls:
            return Episode.answered(hooks.task, messages, await hooks.reward(messages))
        (call,) = reply.tool_calls
        result = await call_tool(hooks.environment, call, limits, hooks.threads)
        messages.append(Message("tool", result.content, author="env", name=call.name))
        show(conversation_text(map(plain_message, messages[-1:])))
    return None


def _typed_reply(show: Show, ask: Ask) -> Message | None:
    """A call or an answer; a call that can't be read is asked for again."""
    while (typed := ask()) is not None:
        try:
            return typed_reply(typed)
        except ValueError as error:
            show(f"that is no call: {error}")
    return None


def typed_reply(typed: str) -> Message:
    """A line that begins with `/` is a tool call, `/name argument=value ...` or `/name {"argument": value}`; any other
    is the answer, and `//` begins one that begins with `/`.

    A value is JSON, or else text. Raises ValueError for a call that can't be read.
    """
    if not typed.startswith(_CALLS) or typed.startswith(_CALLS * 2):
        answer = typed[1:] if typed.startswith(_CALLS) else typed
        return Message("assistant", answer, author=LLM)
    name, _, rest = typed.removeprefix(_CALLS).strip().partition(" ")
    return Message("assistant", "", author=LLM, tool_calls=(ToolCall(name, _arguments(rest.strip())),))


def _arguments(text: str) -> Mapping[str, Any]:
    if text.startswith("{"):
        read = json.loads(text)
        return dict(read)
    arguments: dict[str, Any] = {}
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} has no =; write argument=value")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments
