"""Plays conversations with an environment's own scripted demonstrator."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from agentloop.environments import Environment, EnvironmentFactory, Task, call_demonstrated
from agentloop.environments.check import start_now
from agentloop.environments.environment import quoted_task
from agentloop.environments.tools.worker_threads import close_now
from agentloop.user_code import failing_as
from context import Message
from context.authors import LLM
from context.strategies import Strategy

_LONGEST_RESULT = 20_000
"""Characters."""


def demonstrate(environment: Environment, task: Task, rng: random.Random, *, where: str) -> tuple[Message, ...]:
    """Play one conversation with the demonstrator, whose author is `llm`; `where` names the class in errors."""
    start_now(environment, task, where)
    messages = list(task.messages())
    while True:
        rule = f"{where}.demonstrate must bring its episodes to an answer, got"
        with failing_as(rule, f" for {quoted_task(task, messages)}. Mend it."):
            reply = replace(environment.demonstrate(task, messages, rng), author=LLM)
        messages.append(reply)
        if not reply.tool_calls:
            return tuple(messages)
        for call in reply.tool_calls:
            result = call_demonstrated(environment, call, max_chars=_LONGEST_RESULT)
            messages.append(Message("tool", result.content, author="env", name=call.name, tool_call_id=call.id))


@contextmanager
def demonstrated(
    factory: EnvironmentFactory, rng: random.Random
) -> Iterator[tuple[Environment, Task, tuple[Message, ...]]]:
    """The block has a demonstration of a new task, with the instance that played it; the end closes the instance."""
    environment, task = factory.create(), factory.make_task(rng)
    with factory.connected(environment) as servers:
        servers.result()
        try:
            yield environment, task, demonstrate(environment, task, rng, where=factory.where)
        finally:
            close_now(environment, factory.where)


def demonstrations(
    factory: EnvironmentFactory, *, seed: int, strategy: Strategy | None = None
) -> Iterator[tuple[Message, ...]]:
    """Yield demonstrations of new tasks without end, every second one with the hints of the `strategy`."""
    rng = random.Random(seed)
    for number in itertools.count():
        with demonstrated(factory, rng) as (_, task, messages):
            pass
        if strategy is not None and number % 2:
            opening = task.messages()
            messages = (*strategy.hinted(opening, task.hint), *messages[len(opening) :])
        yield messages
