"""What environments say was solved by episodes that failed: that task's reward confirms it, and so do its tools."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from agentloop.environments import Achieved, Environment, LookupChain, Task, call_demonstrated
from agentloop.environments.lookup_chain import KEYS
from context.messages import Message, ToolCall
from examples.fetch_place import FetchPlace

LONGEST = 12
TOOLS = {"lookup": "key", "go": "place", "take": "item", "put": "container"}


def play(environment: Environment, task: Task, say: Callable[[list[Message]], Message]) -> list[Message]:
    environment.start(task)
    messages = list(task.messages())
    for _ in range(LONGEST):
        messages.append(say(messages))
        if not messages[-1].tool_calls:
            break
        for call in messages[-1].tool_calls:
            content = call_demonstrated(environment, call, max_chars=1000).content
            messages.append(Message("tool", content, author="env", name=call.name))
    return messages


def careless(environment: Environment, task: Task, rng: random.Random) -> Callable[[list[Message]], Message]:
    """As the demonstrator, but now and then with any call, two calls at once, an old call again, or any answer."""
    names = [name for name in TOOLS if hasattr(environment, name)]

    def any_call() -> ToolCall:
        name = rng.choice(names)
        words: Sequence[Any] = (*rng.sample(KEYS, 3), "", 7, None, ["pearl"])
        return ToolCall(name, {rng.choice([TOOLS[name], "other"]): rng.choice(words)})

    def say(messages: list[Message]) -> Message:
        calls = [call for message in messages for call in message.tool_calls]
        odd = rng.random()
        if odd < 0.04:
            return Message("assistant", "", author="llm", tool_calls=(any_call(),))
        if odd < 0.06:
            return Message("assistant", "", author="llm", tool_calls=(any_call(), any_call()))
        if odd < 0.10 and calls:
            return Message("assistant", "", author="llm", tool_calls=(rng.choice(calls),))
        if odd < 0.12:
            return Message(
                "assistant",
                rng.choice(["Done.", "", '"pearl" is in "reed".', 'The code is "50".', "I can't."]),
                author="llm",
            )
        try:
            return environment.demonstrate(task, messages, rng)
        except (KeyError, IndexError, StopIteration):  # a demonstrator goes by records, of which some call got none
            return Message("assistant", "Done.", author="llm")

    return say


def conversations(make: Callable[[], Environment], *, count: int) -> Iterator[tuple[Task, list[Message]]]:
    for seed in range(count):
        rng, environment = random.Random(seed), make()
        task = environment.make_task(rng)
        yield task, play(environment, task, careless(environment, task, rng))


def end_of(messages: Sequence[Message], achieved: Achieved) -> list[Message]:
    replies = [i for i, message in enumerate(messages) if message.author == "llm"]
    return list(messages[replies[achieved.first_turn] :])


@pytest.mark.parametrize("make", [lambda: LookupChain(hops=(3, 6)), FetchPlace], ids=["lookup_chain", "fetch_place"])
def test_all_that_is_claimed_of_failed_conversations_is_a_success_of_its_task(
    make: Callable[[], Environment],
) -> None:
    counts, count = Counter[str](), 1_000
    for task, messages in conversations(make, count=count):
        if make().reward(task, messages) == 1.0:
            counts["solved"] += 1
            continue
        counts["failed"] += 1
        for achieved in make().achieved(task, messages):
            counts["claimed"] += 1
            end = end_of(messages, achieved)
            environment = make()
            environment.start(achieved.task)
            again = [
                call_demonstrated(environment, call, max_chars=1000).content
                for message in end
                for call in message.tool_calls
            ]
            # Its tools answer the same for the new task as they did for the old one, to the byte.
            assert again == [message.content for message in end if message.role == "tool"]
            assert environment.reward(achieved.task, [*achieved.task.messages(), *end]) == 1.0
            assert achieved.task.payload != task.payload
    assert counts["solved"] > 0.03 * count
    assert counts["claimed"] > 0.3 * counts["failed"]


STORE: Mapping[str, Any] = {
    "pearl": {"next": "arrow", "see": "coral"},
    "arrow": {"code": "50", "see": "amber"},
    "coral": {"next": "amber", "see": "arrow"},
    "amber": {"code": "77", "see": "arrow"},
}
ASKED = Task("What is the code?", {"key": "pearl", "code": "50", "hops": 2, "store": STORE})


def looked_up(*keys: str, answer: str) -> list[Message]:
    say = [Message("assistant", "", author="llm", tool_calls=(ToolCall("lookup", {"key": key}),)) for key in keys]
    script = iter([*say, Message("assistant", answer, author="llm")])
    return play(LookupChain(), ASKED, lambda _: next(script))


def test_a_wrong_trail_is_the_right_one_of_the_key_it_began_with() -> None:
    messages = looked_up("pearl", "coral", "amber", answer='The code is "77".')
    (achieved,) = LookupChain().achieved(ASKED, messages)
    assert achieved.first_turn == 1
    assert achieved.task.messages()[-1].content == 'What is the code of "coral"?'
    assert dict(achieved.task.payload) == {"key": "coral", "code": "77", "hops": 2, "store": STORE}


@pytest.mark.parametrize(
    ("keys", "answer"),
    [
        (("coral", "amber"), 'The code is "50".'),
        (("coral",), 'The code is "77".'),
        (("amber", "nothing"), 'The code is "77".'),
        ((), 'The code is "77".'),
    ],
)
def test_a_wrong_answer_solved_nothing(keys: tuple[str, ...], answer: str) -> None:
    assert LookupChain().achieved(ASKED, looked_up(*keys, answer=answer)) == ()
