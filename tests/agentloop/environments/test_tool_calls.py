"""Calling a tool: whatever it or the policy does wrong becomes an observation, in time."""

import asyncio
import gc
import math
import os
import random
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from agentloop import Observation
from agentloop.config.sections.rollout import RolloutSection
from agentloop.environments import Environment, ToolResult, tool
from agentloop.environments.tools.worker_threads import WorkerThreads, run_coroutine
from agentloop.errors import NotJudged, UserError, WrongObservation
from context.messages import ToolCall
from tests.fakes.environments.faulty_tools import GIFTS, HANGS, PATIENT, Faulty, ask, call, called, error


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("add", {"a": 1}, "3"),
        ("add", {"a": 1, "b": 5}, "6"),
        ("describe", {"items": [1, 2.5], "flags": {"x": True}}, "[1.0, 2.5] {'x': True} None"),
        ("describe", {"items": [], "flags": {}, "unit": "m"}, "[] {} m"),
        ("give", {"kind": "umlaut"}, '{"grüße": null}'),
    ],
)
def test_tool_result_is_text_as_it_is_and_all_else_json(name: str, arguments: Any, content: str) -> None:
    assert call(name, arguments) == ToolResult(content, None)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("add", {}, "argument 'a' is missing"),
        ("describe", {"item": [1], "flags": {}}, "describe has no argument 'item'. Did you mean items?"),
        ("add", {"a": True}, "argument 'a': Input should be a valid integer"),
        ("ad", {}, "there is no tool 'ad'. Did you mean add?"),
        ("add", [1, 2], "arguments must be an object, got list"),
        ("describe", {"items": [math.inf], "flags": {}}, "argument 'items': Input should be a finite number"),
    ],
)
def test_tool_arguments_that_do_not_fit_are_explained_to_the_policy(name: str, arguments: Any, text: str) -> None:
    result = call(name, arguments)
    assert result.error_kind == ("bad_arguments" if name != "ad" else "unknown_tool")
    assert error(result).startswith(text)


def test_tool_that_raises_is_an_observation_of_one_line() -> None:
    said = {
        "empty": "KeyError",
        "exit": "SystemExit: 3",
        "unprintable": "_Unprintable",
        "long": "ValueError: " + "y" * 300 + "...",
        "surrogate": "ValueError: \ufffd",
        "recursion": "RecursionError: maximum recursion depth exceeded",
    }
    for kind, text in said.items():
        result = call("fail", {"kind": kind}, limits=PATIENT)
        assert (error(result), result.error_kind) == (text, "raised")


def test_result_that_is_long_or_no_text_is_cut_replaced_or_named_by_its_type() -> None:
    assert call("give", {"kind": "long"}).content == "x" * 100 + "... [cut: 900 characters left out]"
    for kind, content in {"nul": "a\ufffdb", "surrogate in json": '["a\ufffdb"]'}.items():
        assert call("give", {"kind": kind}) == ToolResult(content, "not_text")
    for kind in ("bytes", "set", "nan", "cycle"):
        result = call("give", {"kind": kind})
        assert result.error_kind == "not_text" and error(result).startswith("the tool returned ")


@pytest.mark.parametrize("kind", list(HANGS))
def test_tool_that_hangs_is_left_at_its_limit(kind: str) -> None:
    result = call("hang", {"kind": kind})
    assert (error(result), result.error_kind) == ("hang took longer than 0.3 s", "timeout")
    assert sys.exc_info() == (None, None, None)


def test_calls_that_run_after_their_deadline_are_counted_and_too_many_are_refused() -> None:
    over, ended = threading.Event(), threading.Semaphore(0)

    def call() -> None:
        over.wait(60)
        ended.release()

    async def calls() -> int:
        threads = WorkerThreads(8)
        for _ in range(256):
            with pytest.raises(TimeoutError):
                await threads.run(call, timeout_s=0)
        with pytest.raises(UserError, match="tools must end, got 257 calls that went on behind their deadline"):
            await threads.run(call, timeout_s=0)
        over.set()
        for _ in range(257):
            assert await asyncio.to_thread(ended.acquire)
        return await threads.run(lambda: 3, timeout_s=20)

    assert run_coroutine(calls()) == 3


def test_a_call_that_fails_as_its_caller_goes_away_is_no_line_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    async def calls() -> None:
        threads = WorkerThreads(1)
        for _ in range(20):
            asked = asyncio.ensure_future(threads.run(lambda: 1 / 0, timeout_s=20))
            await asyncio.sleep(0)
            time.sleep(0.002)  # the call fails now, so its failure and the cancellation arrive together
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    run_coroutine(calls())
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []


def test_tool_that_forks_leaves_no_second_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GIFTS, "fork", os.fork)
    child = int(call("give", {"kind": "fork"}).content)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == os.EX_SOFTWARE


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


LONG_TEXT, LONG_NAME = "x" * 10_000_000, "add" * 3_000_000


def _malformed(rng: random.Random) -> ToolCall:
    text = "".join(chr(rng.choice((0, 10, 34, 92, 0x202E, 0xD800, 0xFFFF, 0x1F600))) for _ in range(rng.randint(0, 20)))
    values: list[Any] = [
        *(None, True, -1, 10**400, 1e308, float("inf"), float("nan"), text, LONG_TEXT),
        *([], {}, [text], {text: text}, {"a": {"b": [None]}}, _nested(rng.choice((1, 10, 10_000)))),
    ]
    tools = ["add", "describe", "anything", "count", "give", "", "__init__", "reward", text, LONG_NAME]
    names = ["a", "b", "items", "flags", "unit", "values", "self", "kind", "", text, "__class__"]
    if rng.random() < 0.1:
        return ToolCall(rng.choice(tools), rng.choice(values))
    return ToolCall(rng.choice(tools), {rng.choice(names): rng.choice(values) for _ in range(rng.randint(0, 4))})


def test_malformed_calls_never_raise_and_are_answered_at_once() -> None:
    rng = random.Random(20)
    kinds = set()
    environment = Faulty()
    for _ in range(500):
        call = _malformed(rng)
        began = time.process_time()
        result = called(environment, call, RolloutSection(tool_timeout_s=5, tool_output_chars=1000))
        assert time.process_time() - began < 0.1
        result.content.encode()
        assert "\0" not in result.content
        assert len(result.content) < 1100
        kinds.add(result.error_kind)
    assert kinds == {None, "unknown_tool", "bad_arguments"}


def test_tool_rewards_and_ends_an_episode_and_says_that_nobody_can_judge_it() -> None:
    class Giving(Environment):
        @tool
        def give(self, kind: str) -> Observation:
            """Give something."""
            if kind == "away":
                raise NotJudged("the judge is away")
            return Observation("won", math.nan if kind == "nan" else np.float32(0.5), over=np.bool_(True))  # type: ignore[arg-type]

    assert ask(Giving(), "give", kind="end") == ToolResult("won", reward=0.5, over=True)
    for kind, raised, text in (("away", NotJudged, "the judge is away"), ("nan", WrongObservation, "got nan")):
        with pytest.raises(raised, match=text):
            ask(Giving(), "give", kind=kind)
