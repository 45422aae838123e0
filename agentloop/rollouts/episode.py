"""One episode: prompt, reply, tool results, until an end with a name. Never sees an optimizer."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentloop.config.sections.rollout import RolloutSection
from agentloop.environments import POLICY_ERRORS, Environment, Task, ToolLimits, call_tool
from agentloop.environments.environment import quoted_task
from agentloop.errors import UserError, one_line_with_place, shortened
from agentloop.generation import Completion, GenerationFailed
from context import ContextManager, Message, RenderError, Reply, Segment
from context.strategies import CONTEXT_FULL
from replay.records import StopReason

MALFORMED = "malformed"
UNKNOWN_TOOL = "unknown_tool"


@dataclass(frozen=True)
class Ask:
    """What an episode waits for: a reply to `prompt_ids`."""

    prompt_ids: Sequence[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Episode:
    """One finished run of an environment: what reward functions are given."""

    task: Task
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    environment_reward: float
    """0 unless the policy ended it with an answer; NaN where the engine failed: what it would have been is unknown."""
    stop_reason: str
    problem: str | None
    """What was wrong, in words, where the stop reason alone does not say."""
    error_kind: str | None
    """The last tool error's kind; None when no tool call failed."""
    num_turns: int
    num_tool_calls: int
    entropies: tuple[float, ...]
    """Nats, one per sampled token whose entropy the engine said."""
    rewrites: Mapping[str, int]
    """How often what was shown was rewritten, by kind."""
    num_failed_calls: int = 0
    """Tool calls in which the tool itself failed; wrong names and arguments are the policy's."""
    tool_problem: str | None = None
    """What failed in the last of them, for the tool's author."""

    @property
    def failed(self) -> bool:
        """True: the engine failed it, so it says nothing about the policy."""
        return self.stop_reason == StopReason.ENGINE_FAILURE

    @property
    def num_tokens(self) -> int:
        """Tokens of its longest training sequence, prompt and replies."""
        return max(len(segment.tokens) for segment in self.segments)


def rollout(
    environment: Environment,
    task: Task,
    context: ContextManager,
    *,
    tools: Sequence[Mapping[str, Any]],
    limits: RolloutSection,
) -> Generator[Ask, Completion | GenerationFailed, Episode]:
    """Yields an `Ask` per turn, is sent the `Completion`, returns the `Episode`.

    Only an episode that the policy ended with an answer is scored by the environment; any other end has reward 0
    and is kept: it is what teaches the format. One that the engine failed has no reward, for it teaches nothing.
    """
    _start(environment, task)
    _open(environment, context, task, tools)
    entropies: list[float] = []
    num_turns = 0
    calls = _Calls()
    tool_limits = ToolLimits(timeout_s=limits.tool_timeout_s, max_chars=limits.tool_output_chars)
    stop_reason: str | None = None
    problem: str | None = None
    while stop_reason is None:
        # An answer to a strategy's question has the strategy's own limit, which `room` knows.
        budget = context.room if context.question else min(limits.max_tokens_per_turn, context.room)
        if budget < 1:
            stop_reason = CONTEXT_FULL
            break
        completion = yield Ask(context.prompt_ids, budget)
        if isinstance(completion, GenerationFailed):
            stop_reason, problem = StopReason.ENGINE_FAILURE, shortened(str(completion))
            break
        entropies.extend(completion.entropies or ())
        reply = context.record_reply(
            completion.token_ids, completion.log_probs, policy_version=completion.policy_version
        )
        if reply.outcome == "question":
            stop_reason = context.stopped
            continue
        num_turns += 1
        stop_reason = _ended(reply)
        if stop_reason is None:
            results = _answer(environment, reply, tool_limits, calls)
            stop_reason = context.observe(results) or (StopReason.MAX_TURNS if num_turns == limits.max_turns else None)
    if context.problem is not None:
        problem = shortened(context.problem)
    return Episode(
        task,
        context.segments(),
        context.messages,
        _reward(environment, task, context.messages, stop_reason),
        stop_reason,
        problem,
        calls.error_kind,
        num_turns,
        calls.made,
        tuple(entropies),
        dict(context.rewrites),
        calls.failed,
        calls.problem,
    )


def _open(environment: Environment, context: ContextManager, task: Task, tools: Sequence[Mapping[str, Any]]) -> None:
    try:
        context.begin(task.messages(), tools, hint=task.hint)
    except RenderError:
        raise
    except ValueError as error:
        name = type(environment).__name__
        raise UserError(f"{name} must make tasks whose messages can be shown, got others: {error}") from error
    if context.room < 1:
        raise UserError(
            f"context.max_tokens must leave room for a reply, got a first prompt of {len(context.prompt_ids)} tokens. "
            "Raise it, or shorten the task."
        )


def _start(environment: Environment, task: Task) -> None:
    try:
        environment.start(task)
    except Exception as error:
        raise UserError(
            f"{type(environment).__name__}.start must accept its tasks, got {one_line_with_place(error)} for "
            f"{quoted_task(task)}. Mend it and --resume: this iteration is collected again."
        ) from error


def _ended(reply: Reply) -> str | None:
    if reply.outcome == "final":
        return StopReason.ANSWERED
    if reply.outcome == "truncated":
        return StopReason.TRUNCATED
    return None


@dataclass
class _Calls:
    """What became of an episode's tool calls so far."""

    made: int = 0
    failed: int = 0
    error_kind: str | None = None
    problem: str | None = None


def _answer(environment: Environment, reply: Reply, limits: ToolLimits, calls: _Calls) -> list[Message]:
    """Tool results as messages, counted in `calls`. A malformed call is answered with what was wrong."""
    if reply.outcome == "malformed":
        text = json.dumps({"error": f"malformed tool call: {reply.problem}"}, ensure_ascii=False)
        calls.made += 1
        calls.error_kind = MALFORMED
        return [Message("tool", text, author="env", name="error")]
    messages = []
    for call in reply.message.tool_calls:
        result = call_tool(environment, call, limits)
        calls.made += 1
        calls.error_kind = result.error_kind or calls.error_kind
        if result.error_kind is not None and result.error_kind not in POLICY_ERRORS:
            calls.failed += 1
            calls.problem = f"{call.name}: {result.problem}"
        # A name the policy made up is its own text: it may hold anything, so it is not repeated as a name.
        name = UNKNOWN_TOOL if result.error_kind == UNKNOWN_TOOL else call.name
        messages.append(Message("tool", result.content, author="env", name=name, tool_call_id=call.id))
    return messages


def _reward(environment: Environment, task: Task, messages: Sequence[Message], stop_reason: str) -> float:
    if stop_reason != StopReason.ANSWERED:
        return math.nan if stop_reason == StopReason.ENGINE_FAILURE else 0.0
    name = type(environment).__name__
    try:
        reward = float(environment.reward(task, messages))
    except Exception as error:
        raise UserError(
            f"{name}.reward must return a number, got {one_line_with_place(error)} for {quoted_task(task, messages)}. "
            "Mend it and --resume: this iteration is collected again."
        ) from error
    if not math.isfinite(reward):
        raise UserError(
            f"{name}.reward must return a finite number, got {reward} for {quoted_task(task, messages)}. "
            "Mend it and --resume: this iteration is collected again."
        )
    return reward
