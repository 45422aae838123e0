"""Plays one episode of an agent that is a program or function: its requests to the policy, and its end."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from agentloop.config import RunConfig
from agentloop.environments import Task
from agentloop.environments.row_environment import AgentEnvironment
from agentloop.environments.tools.worker_threads import WorkerThreads
from agentloop.errors import UserCodeFailed, UserCodeLate, UserError, shortened
from agentloop.rollouts.episodes.agent_program import AgentAddress, AgentEnd, run_agent, without_key
from agentloop.rollouts.episodes.episode import AskAny, Episode
from context import AuthorTable, Message
from context.authors import ENV
from context.tokens.session_nodes import Node
from context.tokens.session_segments import segments_of
from context.wording import visible
from replay.records import StopReason

if TYPE_CHECKING:
    from agentloop.gateway.run_gateway import OpenedSession, RunGateway


async def play_agent(
    agent: AgentEnvironment,
    task: Task,
    gateway: RunGateway,
    ask: AskAny,
    *,
    authors: AuthorTable,
    config: RunConfig,
    threads: WorkerThreads,
) -> Episode:
    """Play an episode to its end. If the policy got no request, or its engine failed, the episode does not count."""
    opened = gateway.open(ask)
    stop_reason, end = StopReason.ANSWERED, AgentEnd()
    address = AgentAddress(opened.url, opened.key, opened.local_url)
    timeout_s = config.rollout.episode_timeout_s
    running = asyncio.ensure_future(run_agent(agent, task, address, threads, timeout_s=timeout_s))
    over = asyncio.wrap_future(opened.ended)
    both: list[asyncio.Future[Any]] = [running, over]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            end = running.result()
    except (TimeoutError, UserCodeLate):
        stop_reason = StopReason.OVERTIME
    except (UserCodeFailed, UserError) as problem:
        end = AgentEnd(problem=shortened(without_key(str(problem), opened.key)))
    finally:
        for waited in both:
            waited.cancel()
        await asyncio.gather(*both, return_exceptions=True)  # after this the program has ended
        nodes = opened.close()
    if not over.cancelled():
        over.result()  # raises errors that end the run
    if opened.rewards:
        stop_reason = StopReason.ANSWERED  # a posted reward counts, however the agent ended afterwards
    elif end.problem is not None:
        stop_reason = StopReason.AGENT_FAILED
    judged = bool(config.reward.functions)
    return episode_of(task, nodes, opened, end, stop_reason, authors=authors, judged=judged)


def episode_of(
    task: Task,
    nodes: tuple[Node, ...],
    opened: OpenedSession,
    end: AgentEnd,
    stop_reason: StopReason,
    *,
    authors: AuthorTable,
    judged: bool,
) -> Episode:
    """Make the episode of a closed session from its nodes; posted rewards take precedence over the rewards of `end`.

    An episode without a reward of its own gets the mean of its agents' rewards. `judged`: a reward function will
    replace it.
    """
    segments, last = segments_of(nodes, authors), end.output.strip().rpartition("\n")[2]
    why = ": ".join(filter(None, (end.problem, last)))
    rewards = {**end.rewards, **opened.rewards}
    problem = why if end.problem else None
    if stop_reason == StopReason.ANSWERED and not (rewards or judged):
        problem = NO_REWARD
    own = {agent: reward for agent, reward in rewards.items() if agent}
    unknown = sorted(own.keys() - {node.agent for node in nodes if node.is_trained})
    if unknown and stop_reason == StopReason.ANSWERED:
        stop_reason = StopReason.AGENT_FAILED
        named = visible(without_key(unknown[0], opened.key))
        problem = f"rewards must be of agents that asked as policy/NAME, got one of {named}"
    reward = rewards.get("", math.fsum(own.values()) / max(len(own), 1))
    if not segments:
        stop_reason, reward = StopReason.ENGINE_FAILURE, math.nan
        problem = opened.problem or f"the agent was given no reply of the policy: {why or 'it asked for none'}"
    replies = [node.messages[-1] for node in nodes if node.num_sampled]
    said = [message for node in nodes for message in node.messages]
    ending = "\n".join(filter(None, (end.problem, end.output)))
    return Episode(
        task,
        segments,
        (*said, *([Message("tool", ending, author=ENV, name=PROGRAM)] if ending else [])),
        reward if stop_reason == StopReason.ANSWERED else math.nan if not segments else 0.0,
        stop_reason,
        None if problem is None else shortened(problem),
        num_turns=len(replies),
        num_tool_calls=sum(len(reply.tool_calls) for reply in replies),
        entropies=tuple(opened.entropies),
        nodes=nodes,
        agent_rewards=own if stop_reason == StopReason.ANSWERED else {},
    )


NO_REWARD = (
    'it said no reward, which counts as 0. Let the agent end with a line {"reward": NUMBER}, return or post it, or set '
    "reward.functions"
)
PROGRAM = "agent"
"""Name of the message with an agent's output, which follows the messages of its session."""
