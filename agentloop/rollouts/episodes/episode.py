"""Plays one episode: prompt, replies and tool results, up to an end with a name."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentloop.config.sections.rollout import RolloutSection
from agentloop.engines import Completion, GenerationFailed
from agentloop.environments import POLICY_ERRORS, Environment, Observation, Task
from agentloop.environments.check import said_by
from agentloop.environments.environment import quoted_task
from agentloop.environments.simulated_user import UserCosts
from agentloop.environments.tools.call import MALFORMED, UNKNOWN_TOOL
from agentloop.environments.tools.tool_memory import EpisodeTools
from agentloop.environments.tools.worker_threads import WorkerThreads
from agentloop.errors import NotJudged, UserCodeFailed, UserError, shortened
from agentloop.user_code import failing_as
from context import ContextManager, Message, RenderError, Reply, Segment
from context.authors import LLM
from context.strategies import CONTEXT_FULL
from context.tokens.session_nodes import Node
from replay.records import WHOLE_ENDS, StopReason

FAILED_ENDS = (StopReason.ENGINE_FAILURE, StopReason.NOT_JUDGED)
"""Stop reasons of episodes that say nothing about the policy: their reward is unknown, and they are left out."""
Ask = Callable[[Sequence[int], int], Awaitable[Completion]]
"""Called with a prompt and the most new tokens; raises GenerationFailed."""
Stop = tuple[str, ...]
"""Texts that end a reply, besides the policy's own."""
AskAny = Callable[[int, Stop, Sequence[int], int], Coroutine[Any, Any, Completion]]
"""Called like `Ask`, with the episode's number and stop first; prompts with one number each continue the one before."""


@dataclass(frozen=True)
class Episode:
    """One finished run of an environment. Reward functions get this record."""

    task: Task
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    environment_reward: float
    """The environment's reward; 0 at an end that it does not reward, and NaN (unknown) where the episode failed.
    In the environment `rows`, the value of the first reward function once it was called."""
    stop_reason: str
    problem: str | None
    """What went wrong, in words, where the stop reason alone does not say."""
    num_turns: int
    num_tool_calls: int
    error_kinds: tuple[str, ...] = ()
    """Kinds of the failed tool calls in their order, with wrong names and arguments."""
    entropies: tuple[float, ...] = ()
    """Nats, one per sampled token for which the engine reports an entropy."""
    rewrites: Mapping[str, int] = field(default_factory=dict)
    """How often the context was rewritten, by kind."""
    tool_problems: Mapping[str, str] = field(default_factory=dict)
    """The first failure of each tool by its name, for the tool's author."""
    num_replayed_calls: int = 0
    """Tool calls that were answered from memory."""
    num_tool_runs: int = 0
    run_seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Seconds of each call that was run, by tool name."""
    tool_seconds: float = 0.0
    reply_seconds: float = 0.0
    nodes: tuple[Node, ...] = ()
    """The requests of an agent, from which the segments are made; empty where no agent acts."""
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of single agents by name."""
    close_problem: str | None = None
    """What went wrong when the environment was closed; None: nothing did."""
    user: UserCosts | None = None
    """What the environment's simulated user took; None: it has none."""

    @classmethod
    def answered(cls, task: Task, messages: Sequence[Message], reward: float) -> Episode:
        """Make an episode that ended with an answer and that no policy sampled, so that it has no tokens."""
        calls = [len(message.tool_calls) for message in messages if message.role == "assistant"]
        ended = (reward, StopReason.ANSWERED, None)
        return cls(task, (), tuple(messages), *ended, num_turns=len(calls), num_tool_calls=sum(calls))

    @property
    def num_failed_calls(self) -> int:
        """Number of calls in which the tool failed; wrong names and arguments are the policy's fault."""
        return sum(kind not in POLICY_ERRORS for kind in self.error_kinds)

    @property
    def failed(self) -> bool:
        """True if the engine or the environment failed, so that the episode says nothing about the policy."""
        return self.stop_reason in FAILED_ENDS

    @property
    def answer(self) -> str:
        """The policy's last message; empty if a limit or a failure ended the episode."""
        if self.stop_reason == StopReason.ENDED:
            return next((said.content for said in reversed(self.messages) if said.author == LLM), "")
        return self.messages[-1].content if self.stop_reason == StopReason.ANSWERED else ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the longest training sequence, prompt and replies."""
        return max((len(segment.tokens) for segment in self.segments), default=0)


@dataclass
class EpisodeHooks:
    """Calls the methods of one instance. A failure raises UserError, but a failure of `close` is only returned."""

    environment: Environment
    task: Task
    threads: WorkerThreads
    limits: RolloutSection
    was_started: bool = False

    async def start(self) -> None:
        name = type(self.environment).__name__
        if type(self.environment).start is Environment.start:
            self.was_started = True
            return  # the base class does nothing
        starting = asyncio.ensure_future(self._call(self.environment.start, self.task))
        with failing_as(f"{name}.start must accept its tasks, got", f" for {quoted_task(self.task)}. Mend it."):
            try:
                await asyncio.shield(starting)
            except asyncio.CancelledError:
                # `close` comes next, and must not run beside a `start` that is under way or still waiting.
                await asyncio.wait([starting], timeout=self.limits.tool_timeout_s)
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                raise

    async def reward(self, messages: Sequence[Message], stop_reason: str) -> float:
        """Ask for the reward of an episode with this stop reason; 0 if the environment does not reward this end."""
        self.environment.stop_reason = stop_reason
        if type(self.environment).reward is Environment.reward:
            return self.environment.reward(self.task, messages)
        if stop_reason not in WHOLE_ENDS and not self.environment.rewards_every_end:
            return 0.0
        name, asked = type(self.environment).__name__, quoted_task(self.task, messages)
        with failing_as(f"{name}.reward must return a number, got", f" for {asked}. Mend it."):
            reward = float(await self._call(self.environment.reward, self.task, messages))
        if not math.isfinite(reward):
            raise UserError(f"{name}.reward must return a finite number, got {reward} for {asked}. Mend it.")
        return reward

    async def respond(self, messages: Sequence[Message]) -> Observation | None:
        """Ask the environment what it says to a reply without calls; None: the reply was the answer."""
        name, asked = type(self.environment).__name__, quoted_task(self.task, messages)
        with failing_as(f"{name}.respond must answer any reply, got", f" for {asked}. Mend it."):
            given = await self._call(self.environment.respond, self.task, messages)
        return said_by(given, f"{name}.respond", asked)

    async def close(self) -> str | None:
        """Close the instance and return what went wrong, if anything. A cancelled caller still waits for the end."""
        if not self.was_started or type(self.environment).close is Environment.close:
            return None
        limit = self.limits.tool_timeout_s
        call = self.threads.ask(self.environment.close, timeout_s=limit, setting="rollout.tool_timeout_s")
        closing = asyncio.ensure_future(call)
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait([closing])
            closing.exception()  # reading it keeps asyncio from logging it
            raise
        except (NotJudged, UserCodeFailed, UserError) as problem:  # the episode was judged before
            return str(problem) or type(problem).__name__
        return None

    async def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        def call(*given: Any) -> Any:
            self.was_started = True  # set only here, because the call may first wait for a thread
            return method(*given)

        waits, limits = inspect.iscoroutinefunction(method), self.limits
        self.was_started |= waits
        asked, setting = method if waits else call, "rollout.episode_timeout_s"
        return await self.threads.ask(asked, *args, timeout_s=limits.episode_timeout_s, setting=setting)


async def rollout(hooks: EpisodeHooks, context: ContextManager, *, tools: EpisodeTools, ask: Ask) -> Episode:
    """Play an episode to its end. Without an answer its reward is 0; where the engine failed, the reward is NaN."""
    try:
        episode = await _played(hooks, context, tools, ask)
    finally:
        close_problem = await hooks.close()
    return replace(episode, close_problem=close_problem)


async def _played(hooks: EpisodeHooks, context: ContextManager, tools: EpisodeTools, ask: Ask) -> Episode:
    """Play an episode from the environment's start to its reward."""
    environment, task, limits = hooks.environment, hooks.task, hooks.limits
    turns = _Turns(hooks, tools, context, ask)
    reward = math.nan
    try:
        await hooks.start()
        schemas = [spec.schema for spec in tools.offered.values()]
        open_context(context, task, schemas, asked_by=type(environment).__name__)
        try:
            async with asyncio.timeout(limits.episode_timeout_s):
                stop_reason, problem = await turns.play()
        except TimeoutError:
            stop_reason, problem = StopReason.OVERTIME, None
            if turns.number == 0:
                stop_reason = StopReason.ENGINE_FAILURE
                problem = f"no reply within rollout.episode_timeout_s={limits.episode_timeout_s:g} s"
        if stop_reason != StopReason.ENGINE_FAILURE:
            reward = await hooks.reward(context.messages, stop_reason)
    except NotJudged as failure:
        stop_reason, problem = StopReason.NOT_JUDGED, shortened(str(failure)) or "nobody could judge it"
    return Episode(
        task,
        context.segments(),
        context.messages,
        reward,
        stop_reason,
        shortened(context.problem) if context.problem is not None else problem,
        num_turns=turns.number,
        num_tool_calls=turns.num_tool_calls,
        error_kinds=turns.error_kinds,
        entropies=tuple(turns.entropies),
        rewrites=dict(context.rewrites),
        tool_problems=turns.tool_problems,
        num_replayed_calls=tools.replayed,
        num_tool_runs=tools.runs,
        run_seconds=tools.seconds,
        tool_seconds=turns.tool_seconds,
        reply_seconds=turns.reply_seconds,
        user=None if environment.user is None else environment.user.costs,
    )


@dataclass
class _Turns:
    """Plays the turns of an episode after its first prompt, and counts them."""

    hooks: EpisodeHooks
    tools: EpisodeTools
    context: ContextManager
    ask: Ask
    number: int = 0
    entropies: list[float] = field(default_factory=list)
    num_tool_calls: int = 0
    error_kinds: tuple[str, ...] = ()
    tool_problems: dict[str, str] = field(default_factory=dict)
    tool_seconds: float = 0.0
    reply_seconds: float = 0.0

    async def play(self) -> tuple[str, str | None]:
        """Play turns up to an end. Return the stop reason, and a problem where the reason alone does not say it."""
        context, limits = self.context, self.hooks.limits
        while True:
            # An answer to a strategy's question has the strategy's own limit, which `room` already has.
            budget = context.room if context.question else min(limits.max_tokens_per_turn, context.room)
            if budget < 1:
                return CONTEXT_FULL, None
            began = time.perf_counter()
            try:
                completion = await self.ask(context.prompt_ids, budget)
            except GenerationFailed as failure:
                return StopReason.ENGINE_FAILURE, shortened(str(failure))
            self.reply_seconds += time.perf_counter() - began
            self.entropies.extend(completion.entropies or ())
            version = completion.policy_version
            reply = context.record_reply(completion.token_ids, completion.log_probs, policy_version=version)
            stop_reason = context.stopped if reply.outcome == "question" else await self._go_on(reply)
            if stop_reason is not None:
                return stop_reason, None

    async def _go_on(self, reply: Reply) -> str | None:
        """Let the environment answer a reply. Return the stop reason; None: the episode goes on."""
        self.number += 1
        is_last, is_final = self.number == self.hooks.limits.max_turns, reply.outcome == "final"
        if reply.outcome == "truncated":
            return StopReason.TRUNCATED
        if is_final and type(self.hooks.environment).respond is Environment.respond:
            return StopReason.ANSWERED
        if is_final and is_last:
            return StopReason.MAX_TURNS  # the environment is not asked for what nobody would answer
        began = time.perf_counter()
        if is_final:
            await self.tools.before_response()
        said = await (self.hooks.respond(self.context.messages) if is_final else self._answer(reply))
        self.tool_seconds += time.perf_counter() - began
        if said is None:
            return StopReason.ANSWERED
        if said.reward is not None:
            self.context.reward_reply(said.reward)
        try:
            if said.over:
                self.context.end(said.content)
                return StopReason.ENDED
            stopped = self.context.observe(said.content)
        except ValueError as error:
            name = type(self.hooks.environment).__name__
            raise UserError(f"{name}.respond must return messages that can be shown, got others: {error}") from error
        return stopped or (StopReason.MAX_TURNS if is_last else None)

    async def _answer(self, reply: Reply) -> Observation:
        """Call the reply's tools and count their results; a malformed call gets an error message.

        No tool is called after one that ends the episode.
        """
        if reply.outcome == "malformed":
            text = json.dumps({"error": f"malformed tool call: {reply.problem}"}, ensure_ascii=False)
            unread = Message("tool", text, author="env", name="error", error_kind=MALFORMED)
            self._count(unread)
            return Observation([unread])
        messages, rewards, over = [], [], False
        for call in reply.message.tool_calls:
            result = await self.tools.call(call)
            kind = result.error_kind
            if kind is not None and kind not in POLICY_ERRORS:
                self.tool_problems.setdefault(call.name, str(result.problem))
            # A name that the policy invented may hold any text, so it does not become a message's name.
            name = UNKNOWN_TOOL if kind == UNKNOWN_TOOL else call.name
            answer = Message("tool", result.content, author="env", name=name, tool_call_id=call.id, error_kind=kind)
            self._count(answer)
            messages.append(answer)
            rewards += [] if result.reward is None else [result.reward]
            if over := result.over:
                break
        return Observation(messages, math.fsum(rewards) if rewards else None, over)

    def _count(self, result: Message) -> None:
        self.num_tool_calls += 1
        self.error_kinds += () if result.error_kind is None else (result.error_kind,)


def open_context(context: ContextManager, task: Task, tools: Sequence[Mapping[str, Any]], *, asked_by: str) -> None:
    """Begin a context with a task's first prompt. Raises UserError if the prompt can't be shown or is too long."""
    begin_context(context, task, tools, asked_by=asked_by)
    if context.room < 1:
        raise UserError(
            f"context.max_tokens must leave room for a reply, got a first prompt of {len(context.prompt_ids)} tokens "
            f"for {quoted_task(task)}. Raise it, or shorten the task."
        )


def begin_context(context: ContextManager, task: Task, tools: Sequence[Mapping[str, Any]], *, asked_by: str) -> None:
    """Begin a context with a task's first prompt, of any length. Raises UserError if the prompt can't be shown."""
    try:
        context.begin(task.messages(), tools, hint=task.hint)
    except RenderError:
        raise
    except ValueError as error:
        raise UserError(f"{asked_by} must make tasks whose messages can be shown, got others: {error}") from error
