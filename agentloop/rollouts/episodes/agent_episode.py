"""One episode of an agent that is a program of its own: what it asked of the policy, and how it ended."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from agentloop.config.sections.rollout import RolloutSection
from agentloop.environments import Task
from agentloop.environments.tools.worker_threads import WorkerThreads
from agentloop.errors import UserCodeFailed, UserError, shortened
from agentloop.rollouts.episodes.agent_program import AgentAddress, AgentEnd, run_agent
from agentloop.rollouts.episodes.episode import AskAny, Episode
from context import AuthorTable, Message
from context.authors import ENV
from context.tokens.session_nodes import Node, segments_of
from replay.records import StopReason

if TYPE_CHECKING:
    from agentloop.gateway.run_gateway import OpenedSession, RunGateway


async def play_agent(
    agent: str,
    task: Task,
    gateway: RunGateway,
    ask: AskAny,
    *,
    authors: AuthorTable,
    limits: RolloutSection,
    threads: WorkerThreads,
) -> Episode:
    """A finished episode; one in which the policy was asked nothing, or whose engine failed it, says nothing of it."""
    opened = gateway.open(ask)
    stop_reason, end = StopReason.ANSWERED, AgentEnd()
    address = AgentAddress(opened.url, opened.key)
    running = asyncio.ensure_future(run_agent(agent, task, address, threads, timeout_s=limits.episode_timeout_s))
    over = asyncio.ensure_future(_done(opened.ended))
    try:
        await asyncio.wait([running, over], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            end = running.result()
    except TimeoutError:
        stop_reason = StopReason.OVERTIME
    except (UserCodeFailed, UserError) as problem:
        end = AgentEnd(problem=shortened(str(problem)))
    finally:
        for waited in (running, over):
            waited.cancel()
        await asyncio.gather(running, over, return_exceptions=True)  # the program is ended
        nodes = opened.close()
    # An agent may print what it reads from its environment.
    why = end.problem and end.problem.replace(opened.key, "***")
    end = replace(end, problem=why, output=end.output.replace(opened.key, "***"))
    posted = opened.rewards.get("")
    if end.problem is not None and posted is None:
        stop_reason = StopReason.AGENT_FAILED
    return episode_of(task, nodes, opened, end, stop_reason, posted=posted, authors=authors)


async def _done(future: Future[None]) -> None:
    await asyncio.wrap_future(future)


def episode_of(
    task: Task,
    nodes: tuple[Node, ...],
    opened: OpenedSession,
    end: AgentEnd,
    stop_reason: StopReason,
    *,
    posted: float | None,
    authors: AuthorTable,
) -> Episode:
    """The episode behind the nodes of a session that was closed; `posted` is its reward, and counts before `end`'s."""
    segments = segments_of(nodes, authors)
    problem, reward = end.problem, posted if posted is not None else end.reward
    if not segments:
        stop_reason, reward = StopReason.ENGINE_FAILURE, math.nan
        last = end.output.strip().rpartition("\n")[2]
        why = ", ".join(filter(None, (end.problem, last))) or "it asked for none"
        problem = opened.problem or f"the agent was given no reply of the policy: {why}"
    replies = [node.messages[-1] for node in nodes if node.num_sampled]
    said = [message for node in nodes for message in node.messages]
    ending = "\n".join(filter(None, (end.problem, end.output)))
    return Episode(
        task,
        segments,
        (*said, *([Message("tool", ending, author=ENV, name=PROGRAM)] if ending else [])),
        (reward or 0.0) if stop_reason == StopReason.ANSWERED else math.nan if not segments else 0.0,
        stop_reason,
        None if problem is None else shortened(problem),
        num_turns=len(replies),
        num_tool_calls=sum(len(reply.tool_calls) for reply in replies),
        entropies=tuple(opened.entropies),
        nodes=nodes,
    )


PROGRAM = "agent"
"""Who is said to have written an agent's output, behind all that was said in its session."""
