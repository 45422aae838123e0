"""The quickstart's environment: what its stores, rewards and careless demonstrations are like."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from agentloop.environments import LookupChain, Task, ToolLimits, call_demonstrated
from agentloop.environments.lookup_chain import CODES, KEYS, MAX_CALLS
from context.messages import Message, ToolCall
from tests.fakes.environments.faulty_tools import called


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


def test_smaller_stores_have_the_first_keys_and_codes_to_match() -> None:
    for task in tasks(20, hops=[2, 3], keys=8):
        assert sorted(task.payload["store"]) == sorted(KEYS[:8])
        # 50 codes for 32 keys: 8 x 50 / 32 = 12.5
        assert {r["code"] for r in task.payload["store"].values() if "code" in r} <= set(CODES[:12])


def test_store_has_every_key_and_every_record_one_way_on() -> None:
    for task in tasks(50):
        store = task.payload["store"]
        assert sorted(store) == sorted(KEYS)
        for record in store.values():
            assert list(record) in (["next", "see"], ["code", "see"])
            assert record["see"] in store
            assert record.get("next", record["see"]) in store


def test_next_leads_to_the_right_code_in_two_to_five_lookups() -> None:
    lengths = set()
    for task in tasks(200):
        chain = chain_of(task, task.payload["key"])
        assert len(chain) == task.payload["hops"]
        assert task.payload["store"][chain[-1]]["code"] == task.payload["code"]
        lengths.add(len(chain))
    assert lengths == {2, 3, 4, 5}


def test_see_leads_to_wrong_codes_with_no_way_back() -> None:
    for task in tasks(50):
        store, right = task.payload["store"], set(chain_of(task, task.payload["key"]))
        for key, record in store.items():
            assert record["see"] not in right
            assert record["see"] != key
            assert key in right or record.get("next") not in right
            assert store[chain_of(task, record["see"])[-1]]["code"] != task.payload["code"]


def test_lookup_is_of_the_store_of_its_task_and_an_unknown_key_is_an_error_to_read() -> None:
    first, second = tasks(2)
    assert first.payload["store"] != second.payload["store"]
    environment = LookupChain()
    environment.start(second)
    shown = [called(environment, ToolCall("lookup", {"key": key}), ToolLimits(5, 1000)) for key in ("pearl", "perl")]
    assert [one.content for one in shown] == [json.dumps(second.payload["store"]["pearl"]), '{"error": "unknown key"}']


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Message("assistant", 'The code is "78".'), 1.0),
        (Message("assistant", 'The code is "79".'), 0.0),
        (Message("assistant", "The code is 78."), 0.0),
        (Message("assistant", 'The code is "78". '), 0.0),
        (Message("assistant", ""), 0.0),
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


def test_thoughts_name_the_field_that_is_gone_by_and_change_nothing_else() -> None:
    for seed, task in enumerate(tasks(30)):
        plain, thinking = (demonstrate(task, random.Random(seed), thinking=thinks) for thinks in (False, True))
        assert [(m.content, m.tool_calls) for m in plain] == [(m.content, m.tool_calls) for m in thinking]
        assert all(message.reasoning is None for message in plain)
        for before, message in pairwise(thinking):
            if message.role != "assistant":
                continue
            field, value = str(message.reasoning).split(" is ")
            if field == "key":
                assert before.content == f"What is the code of {value}?"
            else:
                assert json.loads(before.content)[field] == json.loads(value)
            said = message.tool_calls[0].arguments["key"] if message.tool_calls else message.content
            assert json.loads(value) in said


def test_padding_adds_words_behind_the_record_that_are_no_keys() -> None:
    (task,) = tasks(1)
    plain, padded = LookupChain(), LookupChain(padding=9)
    for environment in (plain, padded):
        environment.start(task)
    for key in ("pearl", "perl"):
        short, long = plain.lookup(key), padded.lookup(key)
        assert list(long) == [*short, "note"]
        assert {name: long[name] for name in short} == short
        words = long["note"].split()
        assert len(words) == 9
        assert not {*words} & {*KEYS, *CODES}


def test_hint_is_the_trail_and_stays_out_of_the_prompt() -> None:
    (task,) = tasks(1)
    assert task.hint == "The trail: " + ", ".join(f'"{key}"' for key in chain_of(task, task.payload["key"])) + "."
    assert task.hint not in "".join(message.content for message in task.messages())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"hops": hops}, "hops must be") for hops in ((0, 2), (3, 2), (2, 9))),
        ({"hops": (2, 3), "keys": 5}, r"keys must be 6 \(the longest chain, and decoys\) to 32, got 5"),
        ({"padding": -1}, "padding must be >= 0, got -1"),
        ({"delay_s": -1}, "delay_s must be >= 0, got -1"),
    ],
)
def test_options_that_make_no_chain_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LookupChain(**options)
