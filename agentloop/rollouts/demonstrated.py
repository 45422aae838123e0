"""Plays conversations with an environment's own scripted demonstrator."""

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from agentloop.environments import Environment, EnvironmentFactory, Observation, Task, call_demonstrated
from agentloop.environments.check import respond_now, start_now
from agentloop.environments.environment import quoted_task
from agentloop.environments.tools.call import Tools
from agentloop.environments.tools.worker_threads import close_now
from agentloop.user_code import failing_as
from context import Message
from context.authors import LLM
from context.messages import ToolCall
from context.strategies import Strategy

_LONGEST_RESULT = 20_000
"""Characters of a tool result that the demonstrator sees."""


def demonstrate(
    factory: EnvironmentFactory, environment: Environment, task: Task, rng: random.Random
) -> tuple[Message, ...]:
    """Play one conversation with the demonstrator, whose author is `llm`."""
    where, tools = factory.where, factory.tool_specs(task)
    start_now(environment, task, where)
    messages = list(task.messages())
    while True:
        rule = f"{where}.demonstrate must bring its episodes to an answer, got"
        with failing_as(rule, f" for {quoted_task(task, messages)}. Mend it."):
            reply = replace(environment.demonstrate(task, messages, rng), author=LLM)
        messages.append(reply)
        said: Observation | None
        if reply.tool_calls:
            said = _called(environment, tools, reply.tool_calls)
        else:
            said = respond_now(environment, task, tuple(messages), where)
        if said is None:
            return tuple(messages)
        messages[-1] = replace(reply, reward=said.reward)
        messages += said.content
        if said.over:
            return tuple(messages)


def _called(environment: Environment, tools: Tools, calls: Sequence[ToolCall]) -> Observation:
    """Answer the calls of a reply, up to one that ends the episode."""
    said = Observation([])
    for call in calls:
        result = call_demonstrated(environment, tools, call, max_chars=_LONGEST_RESULT)
        answer = Message("tool", result.content, author="env", name=call.name, tool_call_id=call.id)
        rewards = [reward for reward in (said.reward, result.reward) if reward is not None]
        said = Observation([*said.content, answer], sum(rewards) if rewards else None, result.over)
        if result.over:
            break
    return said


@contextmanager
def demonstrated(
    factory: EnvironmentFactory, task: Task, rng: random.Random
) -> Iterator[tuple[Environment, tuple[Message, ...]]]:
    """Yield a demonstration of a task with the instance that played it, and close the instance afterwards."""
    environment = factory.create()
    with factory.connected(environment) as servers:
        servers.result()
        try:
            yield environment, demonstrate(factory, environment, task, rng)
        finally:
            close_now(environment, factory.where)


def demonstrations(
    factory: EnvironmentFactory, *, seed: int, strategy: Strategy | None = None
) -> Iterator[tuple[Task, tuple[Message, ...]]]:
    """Yield new tasks and their demonstrations without end, every second one with the hints of the `strategy`."""
    rng = random.Random(seed)
    for number in itertools.count():
        task = factory.make_task(rng)
        with demonstrated(factory, task, rng) as (_, messages):
            pass
        if strategy is not None and number % 2:
            opening = task.messages()
            messages = (*strategy.hinted(opening, task.hint), *messages[len(opening) :])
        yield task, messages
