"""The quickstart's environment: what its stores, rewards and careless demonstrations are like."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from agentloop.environments import LookupChain, Task, call_demonstrated
from agentloop.environments.lookup_chain import KEYS, MAX_CALLS
from context.messages import Message, ToolCall


def tasks(count: int, **options: Any) -> list[Task]:
    environment = LookupChain(**options)
    return [environment.make_task(random.Random(seed)) for seed in range(count)]


def chain_of(task: Task, key: str) -> list[str]:
    """The keys from `key` along `next`."""
    store, keys = task.payload["store"], [key]
    while "next" in store[keys[-1]]:
        keys.append(store[keys[-1]]["next"])
    return keys


def demonstrate(task: Task, rng: random.Random, **options: Any) -> list[Message]:
    environment = LookupChain(**options)
    environment.start(task)
    messages = list(task.messages())
    while True:
        messages.append(environment.demonstrate(task, messages, rng))
        if not messages[-1].tool_calls:
            return messages
        (call,) = messages[-1].tool_calls
        result = call_demonstrated(environment, call, max_chars=1000)
        assert result.error_kind is None
        messages.append(Message("tool", result.content, author="env", name=call.name))


def reward(task: Task, messages: list[Message]) -> float:
    return LookupChain().reward(task, messages)


def test_next_leads_to_the_right_code_in_two_to_five_lookups() -> None:
    lengths = set()
    for task in tasks(200):
        chain = chain_of(task, task.payload["key"])
        assert len(chain) == task.payload["hops"]
        assert task.payload["store"][chain[-1]]["code"] == task.payload["code"]
        lengths.add(len(chain))
    assert lengths == {2, 3, 4, 5}
    assert task.hint == "The trail: " + ", ".join(f'"{key}"' for key in chain) + "."


def test_see_leads_to_wrong_codes_with_no_way_back() -> None:
    for task in tasks(50):
        store, right = task.payload["store"], set(chain_of(task, task.payload["key"]))
        assert sorted(store) == sorted(KEYS)
        for key, record in store.items():
            assert record["see"] not in right
            assert record["see"] != key
            assert key in right or record.get("next") not in right
            assert store[chain_of(task, record["see"])[-1]]["code"] != task.payload["code"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Message("assistant", 'The code is "78".'), 1.0),
        (Message("assistant", 'The code is "79".'), 0.0),
        (Message("assistant", "The code is 78."), 0.0),
        (Message("assistant", 'The code is "78". '), 0.0),
        (Message("tool", 'The code is "78".'), 0.0),
        (Message("assistant", 'The code is "78".', tool_calls=(ToolCall("lookup", {"key": "oak"}),)), 0.0),
    ],
)
def test_reward_is_one_for_exactly_the_right_answer(message: Message, expected: float) -> None:
    task = Task("", {"code": "78"})
    assert reward(task, [*task.messages(), message]) == expected


def test_demonstrator_that_is_never_careless_is_always_right() -> None:
    for seed, task in enumerate(tasks(30)):
        messages = demonstrate(task, random.Random(seed), p_next=1.0, p_stop=1.0)
        assert reward(task, messages) == 1.0
        assert sum(len(message.tool_calls) for message in messages) == task.payload["hops"]


def test_careless_demonstrator_succeeds_in_a_tenth_to_a_quarter_of_its_tries() -> None:
    """Halving per choice: 2 to 5 choices give (1/4 + 1/8 + 1/16 + 1/32) / 4 = 0.117."""
    rewards = [reward(task, demonstrate(task, random.Random(seed))) for seed, task in enumerate(tasks(1000))]
    assert 0.10 <= sum(rewards) / len(rewards) <= 0.15


@pytest.mark.parametrize("options", [{}, {"p_next": 0.0, "p_stop": 0.0}, {"hops": (8, 8), "p_next": 0.1}])
def test_demonstrator_calls_keys_it_was_shown_and_answers_the_code_it_saw_last(
    options: dict[str, Any],
) -> None:
    for seed, task in enumerate(tasks(100, **({"hops": options["hops"]} if "hops" in options else {}))):
        messages = demonstrate(task, random.Random(seed), **options)
        calls = 0
        for before, message in pairwise(messages):
            for call in message.tool_calls:
                calls += 1
                assert f'"{call.arguments["key"]}"' in before.content
        assert 1 <= calls <= MAX_CALLS
        assert messages[-1].content == f'The code is "{json.loads(messages[-2].content)["code"]}".'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"hops": hops}, "hops must be") for hops in ((0, 2), (3, 2), (2, 9))),
        ({"padding": -1}, "padding must be >= 0, got -1"),
        ({"delay_s": -1}, "delay_s must be >= 0, got -1"),
    ],
)
def test_options_that_make_no_chain_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LookupChain(**options)
