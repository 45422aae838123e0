"""Plays one episode of an agent that is a program or function: its requests to the policy, and its end."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from agentloop.config import RunConfig
from agentloop.environments import Task
from agentloop.environments.row_environment import AgentEnvironment
from agentloop.environments.sandbox.bubblewrap import SandboxFailed
from agentloop.environments.tools.worker_threads import WorkerThreads
from agentloop.errors import NotJudged, UserCodeFailed, UserCodeLate, UserError, shortened
from agentloop.rollouts.episodes.agent_program import AgentAddress, AgentEnd, run_agent, without_key
from agentloop.rollouts.episodes.episode import FAILED_ENDS, AskAny, Episode
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
    """Play an episode to its end. One that the engine failed, or that nobody can judge, does not count."""
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
    except (NotJudged, SandboxFailed, UserCodeFailed, UserError) as problem:
        said, not_judged = str(problem) or type(problem).__name__, isinstance(problem, (NotJudged, SandboxFailed))
        end = AgentEnd(problem=said, not_judged=not_judged)
    finally:
        for waited in both:
            waited.cancel()
        await asyncio.gather(*both, return_exceptions=True)  # after this the program has ended
        nodes = opened.close()
    if not over.cancelled():
        over.result()  # raises errors that end the run
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
    replace it. `stop_reason` is `answered`, or `overtime` where the agent's time was over.
    """
    segments, last = segments_of(nodes, authors), end.output.strip().rpartition("\n")[2]
    wrong = None if end.problem is None else shortened(without_key(end.problem, opened.key))
    why = ": ".join(filter(None, (wrong, last)))
    rewards = {**end.rewards, **opened.rewards}
    problem = why if wrong else None
    own = {agent: reward for agent, reward in rewards.items() if agent}
    unknown = sorted(own.keys() - {node.agent for node in nodes if node.is_trained})
    if not segments and (opened.problem or not end.not_judged):
        stop_reason = StopReason.ENGINE_FAILURE
        problem = opened.problem or f"the agent was given no reply of the policy: {why or 'it asked for none'}"
    elif opened.rewards and segments:
        stop_reason = StopReason.ANSWERED  # a posted reward counts, however the agent ended afterwards
    elif end.not_judged:
        stop_reason = StopReason.NOT_JUDGED
    elif opened.problem and (wrong or stop_reason == StopReason.OVERTIME):
        stop_reason, problem = StopReason.ENGINE_FAILURE, opened.problem
    elif wrong:
        stop_reason = StopReason.AGENT_FAILED
    elif stop_reason == StopReason.ANSWERED and not (rewards or judged):
        stop_reason, problem = StopReason.NOT_JUDGED, NO_REWARD
    if unknown and stop_reason == StopReason.ANSWERED:
        stop_reason = StopReason.AGENT_FAILED
        named = visible(without_key(unknown[0], opened.key))
        problem = f"rewards must be of agents that asked as policy/NAME, got one of {named}"
    counts = stop_reason == StopReason.ANSWERED
    reward = rewards.get("", math.fsum(own.values()) / max(len(own), 1)) if counts else 0.0
    replies = [node.messages[-1] for node in nodes if node.num_sampled]
    said = [message for node in nodes for message in node.messages]
    ending = "\n".join(filter(None, (wrong, end.output)))
    return Episode(
        task,
        segments,
        (*said, *([Message("tool", ending, author=ENV, name=PROGRAM)] if ending else [])),
        math.nan if stop_reason in FAILED_ENDS else reward,
        stop_reason,
        None if problem is None else shortened(problem),
        num_turns=len(replies),
        num_tool_calls=sum(len(reply.tool_calls) for reply in replies),
        entropies=tuple(opened.entropies),
        nodes=nodes,
        agent_rewards=own if counts else {},
    )


NO_REWARD = (
    'it said no reward, so nobody judged it. Let the agent end with a line {"reward": NUMBER}, return or post it, or '
    "set reward.functions"
)
PROGRAM = "agent"
"""Name of the message with an agent's output, which follows the messages of its session."""
