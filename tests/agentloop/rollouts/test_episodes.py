"""Whole episodes with a policy that says what is written here: bad tools, bad calls, and every end."""

import logging
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agentloop.config import RunConfig
from agentloop.environments import load_environment
from agentloop.rollouts.actors import Actors
from agentloop.rollouts.trajectories import Collected
from context import ChatTemplate, Renderer, default_authors, loss_mask
from replay.records import Trajectory
from replay.storage.validate import validate
from tests.agentloop.rollouts.collecting import collect
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.scripted import CHATML, CUT, LOG_PROB, ScriptedGenerator, call, scripted_actors

LIMITS = {"max_turns": 3, "max_tokens_per_turn": 200, "tool_timeout_s": 0.3, "tool_output_chars": 60}


def played(actors: Actors, *, size: int = 1, max_tokens: int = 4000, iteration: int = 1) -> Collected:
    """A group of episodes, as the loop collects and stores them."""
    config = RunConfig.model_validate({"rollout": LIMITS, "context": {"max_tokens": max_tokens}})
    task = actors.environments.all[0].make_task(random.Random(0))
    found = collect(actors, [(task, size)], config, iteration=iteration)
    validate(found.trajectories, default_authors())
    return found


def graded(*scripts: Sequence[str]) -> Actors:
    return scripted_actors(load_environment(f"{ENVIRONMENTS / 'faulty_tools.py'}:Graded", {}), scripts)


def episode(*replies: str, max_tokens: int = 4000) -> tuple[Trajectory, list[str]]:
    """One episode with Faulty's tools, and the prompts it was shown."""
    actors = graded(replies)
    (trajectory,) = played(actors, max_tokens=max_tokens).trajectories
    return trajectory, actors.generator.prompts[0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("reply", "kind", "shown"),
    [
        (call("fail", '{"kind": "value"}'), "raised", "ValueError: bad value"),
        (call("flood"), None, "xxxxxxxx... [cut: 16777156 characters left out]"),
        (call("gve"), "unknown_tool", "Did you mean give?"),
        (call("add", '{"a": "x"}'), "bad_arguments", "argument 'a'"),
        (call("add", '{"a": 1,}'), "malformed", "malformed tool call: a tool call is not valid JSON"),
        (call("add", '{"a": 1e999}'), "malformed", "malformed tool call: a tool call holds a number that is too large"),
        ('<tool_call>\n{"name": "add"', "malformed", "malformed tool call"),
    ],
)
def test_bad_tools_and_calls_are_answered_and_the_episode_goes_on(reply: str, kind: str | None, shown: str) -> None:
    trajectory, prompts = episode(reply, "done")
    assert shown in prompts[1]
    record = trajectory.record
    assert (record.stop_reason, record.error_kinds, record.num_turns, record.reward) == ("answered", kind, 2, 1.0)
    assert [m.role for m in trajectory.messages][-3:] == ["assistant", "tool", "assistant"]
    assert trajectory.messages[-3].content + "".join(c.name for c in trajectory.messages[-3].tool_calls) != ""
    # Trained is what was sampled, to the token: the two replies with their end tokens, and nothing of the answer.
    (segment,) = trajectory.segments
    mask = loss_mask(segment.tokens, default_authors())
    said = CHATML.codec.decode(segment.tokens.token_ids[mask].tolist())
    assert said == f"{reply}<|im_end|>done<|im_end|>"
    assert record.num_action_tokens == int(mask.sum())
    assert set(segment.tokens.behavior_log_probs[mask].tolist()) == {LOG_PROB}


def test_every_failing_call_of_an_episode_is_kept_where_it_stands() -> None:
    fails = call("fail", '{"kind": "value"}')
    malformed = call("add", '{"a": 1,}')
    collected = played(graded([f"{fails}\n{call('count')}\n{fails}", fails, malformed]))
    (trajectory,) = collected.trajectories
    assert trajectory.record.error_kinds == "raised raised raised malformed"
    assert (trajectory.record.stop_reason, trajectory.record.num_tool_calls) == ("max_turns", 5)
    results = [message.error_kind for message in trajectory.messages if message.role == "tool"]
    assert results == ["raised", None, "raised", "raised", "malformed"]
    # Of five calls the tool itself failed in three.
    assert collected.extra_metrics["rollout/failed_calls"] == 0.6


@pytest.mark.parametrize(
    ("replies", "reason", "turns"),
    [
        (["done"], "answered", 1),
        ([call("count")] * 3, "max_turns", 3),
        (["I was about to" + CUT], "truncated", 1),
        ([call("count"), '<tool_call>\n{"name": ' + CUT], "truncated", 2),
    ],
)
def test_episodes_end_under_a_name_and_only_answers_are_rewarded(replies: list[str], reason: str, turns: int) -> None:
    trajectory, _ = episode(*replies)
    record = trajectory.record
    assert (record.stop_reason, record.num_turns) == (reason, turns)
    assert (record.reward, record.success) == ((1.0, True) if reason == "answered" else (0.0, False))
    mask = loss_mask(trajectory.segments[0].tokens, default_authors())
    ends = int((trajectory.segments[0].tokens.token_ids[mask] == CHATML.end_id).sum())
    assert ends == turns - (reason == "truncated")  # an end that was not sampled is not trained


def test_episode_ends_when_a_tool_result_leaves_no_room() -> None:
    first, _ = episode(call("count"), "done")
    prompt = first.record.num_tokens - first.record.num_action_tokens
    trajectory, prompts = episode(call("flood"), "never said", max_tokens=prompt + 20)
    assert (trajectory.record.stop_reason, trajectory.record.reward, len(prompts)) == ("context_full", 0.0, 1)
    assert trajectory.record.num_tokens <= prompt + 20


def test_what_a_template_refuses_is_told_once_and_the_episode_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    refusing = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    template = ChatTemplate(CHATML.template_source + refusing, CHATML.special_tokens)
    renderer = Renderer(CHATML.codec, template, authors=default_authors(), stop_ids=frozenset({CHATML.end_id}))
    with caplog.at_level(logging.WARNING):
        collected = played(replace(graded(*[[call("count")]] * 3), renderer=renderer), size=3)
    assert [row.record.stop_reason for row in collected.trajectories] == ["unrenderable"] * 3
    assert collected.metrics()["rollout/stop/unrenderable"] == 1.0
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("episode ended with unrenderable: chat template must render messages with the roles [")
    assert "no tools here" in told


def test_failed_tool_calls_are_counted_and_a_tool_of_many_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    # Of five calls two fail in the tool: 0.4; a name the policy made up, an argument and a broken call are its own.
    fails, made_up = call("fail", '{"kind": "value"}'), call("gve")
    scripts = [[fails, call("count"), "done"], [made_up, fails, "done"], [call("add", '{"a": 1,}'), "done"]]
    actors = graded(*scripts)
    metrics = played(actors, size=3).metrics()
    assert metrics["rollout/failed_calls"] == 0.4
    timed = {name: value for name, value in metrics.items() if name.startswith(("time/reply", "time/tool/"))}
    assert timed.keys() == {"time/reply", "time/tool/count", "time/tool/fail"}  # none of a made-up name
    assert all(0 < seconds < 10 for seconds in timed.values())
    played(replace(actors, generator=ScriptedGenerator(scripts)), size=3, iteration=2)
    quiet = played(graded(["done"])).metrics()
    assert not {"rollout/failed_calls", "rollout/failed_closes"} & quiet.keys()
    (told,) = [message for message in caplog.messages if " must seldom fail, " in message]
    at = r"ValueError: bad value at faulty_tools\.py:\d+\. The policy was shown each error\. Mend the tool, or say"
    got = r"tool fail must seldom fail, got 2 failed of its 2 calls in one iteration \(logged once, above 20%\)"
    assert re.match(f"{got}, the first with {at}", told)


def test_a_tool_that_always_fails_is_told_however_often_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    scripts = [[call("count"), call("count"), "done"]] * 9 + [[call("fail", '{"kind": "value"}'), "done"]] * 2
    assert played(graded(*scripts), size=11).metrics()["rollout/failed_calls"] == 0.1
    assert any(message.startswith("tool fail must seldom fail, got 2 failed of its 2") for message in caplog.messages)


# What runs episodes is light: there may be many such processes


_IMPORTS = """
import importlib, sys
from pathlib import Path
for name in sys.argv[1:]: importlib.import_module(name)
assert not {"torch", "transformers"} & sys.modules.keys()
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say how much memory a process took")
@pytest.mark.parametrize(
    "names",
    [
        ("agentloop.rollouts.collect", "agentloop.rollouts.evaluation", "context", "replay"),
        ("agentloop.cli.main", "agentloop.cli.cluster_commands"),
    ],
    ids=["episodes", "a worker"],
)
def test_what_runs_episodes_takes_120_megabytes_and_no_torch(names: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", _IMPORTS, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) <= 120
