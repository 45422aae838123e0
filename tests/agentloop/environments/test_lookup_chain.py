"""The quickstart's environment: what its stores, rewards and careless demonstrations are like."""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from agentloop.environments import LookupChain, Task, load_environment
from agentloop.environments.lookup_chain import KEYS, MAX_CALLS
from agentloop.rollouts.demonstrated import demonstrate
from context.messages import Message, ToolCall
from tests.fakes.scripted import chain_of

FACTORY = load_environment("lookup_chain", {})


def tasks(count: int, **options: Any) -> list[Task]:
    environment = LookupChain(**options)
    return [environment.make_task(random.Random(seed)) for seed in range(count)]


def demonstrated(task: Task, rng: random.Random, **options: Any) -> Sequence[Message]:
    return demonstrate(FACTORY, LookupChain(**options), task, rng)


def reward(task: Task, messages: Sequence[Message]) -> float:
    return LookupChain().reward(task, messages)


def test_next_leads_to_the_right_code_and_see_to_wrong_ones_with_no_way_back() -> None:
    lengths = set()
    for task in tasks(200):
        store, chain = task.payload["store"], chain_of(task, task.payload["key"])
        assert len(chain) == task.payload["hops"]
        assert store[chain[-1]]["code"] == task.payload["code"]
        assert task.hint == "The trail: " + ", ".join(f'"{key}"' for key in chain) + "."
        lengths.add(len(chain))
        assert sorted(store) == sorted(KEYS)
        for key, record in store.items():
            assert record["see"] not in (*chain, key)
            assert key in chain or record.get("next") not in chain
            assert store[chain_of(task, record["see"])[-1]]["code"] != task.payload["code"]
    assert lengths == {2, 3, 4, 5}


def test_reward_is_one_for_exactly_the_right_answer() -> None:
    right, lookup = 'The code is "78".', (ToolCall("lookup", {"key": "oak"}),)
    wrong = [Message("assistant", text) for text in ('The code is "79".', "The code is 78.", f"{right} ")]
    wrong += [Message("tool", right), Message("assistant", right, tool_calls=lookup)]
    assert [reward(Task("", {"code": "78"}), [Message("user", ""), message]) for message in wrong] == [0.0] * 5
    assert reward(Task("", {"code": "78"}), [Message("assistant", right)]) == 1.0


def test_each_step_of_the_trail_is_paid_once_and_in_order() -> None:
    (task,) = tasks(1, hops=(3, 3))
    first, second, third = chain_of(task, task.payload["key"])
    aside = task.payload["store"][first]["see"]
    replies = [
        Message("assistant", "", author="llm", tool_calls=tuple(ToolCall("lookup", {"key": key}) for key in keys))
        for keys in ((first,), (aside,), (second,), (second, third), ())
    ]
    said = [message for reply in replies for message in (reply, Message("tool", "{}", author="env"))]
    rewards = LookupChain().turn_rewards(task, [*task.messages(), *said])
    assert rewards == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3, 0])


def test_demonstrator_is_always_right_or_careless_to_the_wanted_share() -> None:
    """Halving per choice: 2 to 5 choices give (1/4 + 1/8 + 1/16 + 1/32) / 4 = 0.117."""
    for seed, task in enumerate(tasks(30)):
        messages = demonstrated(task, random.Random(seed), p_next=1.0, p_stop=1.0)
        assert reward(task, messages) == 1.0
        assert sum(len(message.tool_calls) for message in messages) == task.payload["hops"]
    rewards = [reward(task, demonstrated(task, random.Random(seed))) for seed, task in enumerate(tasks(1000))]
    assert 0.10 <= sum(rewards) / len(rewards) <= 0.15


@pytest.mark.parametrize("options", [{}, {"p_next": 0.0, "p_stop": 0.0}, {"hops": (8, 8), "p_next": 0.1}])
def test_demonstrator_calls_keys_it_was_shown_and_answers_the_code_it_saw_last(options: dict[str, Any]) -> None:
    for seed, task in enumerate(tasks(100, **({"hops": options["hops"]} if "hops" in options else {}))):
        messages = demonstrated(task, random.Random(seed), **options)
        calls = [(call, before) for before, message in pairwise(messages) for call in message.tool_calls]
        assert all(f'"{call.arguments["key"]}"' in before.content for call, before in calls)
        assert 1 <= len(calls) <= MAX_CALLS
        assert messages[-1].content == f'The code is "{json.loads(messages[-2].content)["code"]}".'


def test_options_that_make_no_chain_are_refused() -> None:
    for hops in ((0, 2), (3, 2), (2, 9)):
        with pytest.raises(ValueError, match="hops must be"):
            LookupChain(hops)
