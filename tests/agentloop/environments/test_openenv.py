"""Environments behind OpenEnv's protocol."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from agentloop.environments import Environment, EnvironmentFactory, Task, load_environment
from agentloop.environments.openenv import OpenEnv
from agentloop.errors import UserError
from context.messages import Message
from tests.fakes.environments.faulty_tools import ask
from tests.fakes.openenv_server import GuessServer, served

OVER = "The episode is over. Answer to end it."


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(GuessServer()) as url:
        yield url


def started(factory: EnvironmentFactory, task: Task) -> Environment:
    environment = factory.create()
    environment.start(task)
    return environment


def end(environment: Environment) -> float:
    assert isinstance(environment, OpenEnv)
    environment.close()
    return environment.reward(Task("x"), [Message("assistant", "done", author="llm")])


def test_action_schema_of_the_server_is_the_tools(url: str) -> None:
    [tool] = load_environment("openenv", {"url": url}).tools
    function = tool["function"]
    assert (function["name"], function["description"]) == ("step", "Guess the number.")
    assert function["parameters"]["properties"] == {"number": {"type": "integer", "minimum": 0, "maximum": 9}}
    assert function["parameters"]["required"] == ["number"]


def test_episode_is_a_session_whose_rewards_add_up(url: str) -> None:
    factory = load_environment("openenv", {"url": url, "goal": "Guess.", "field": "text"})
    task = factory.make_task(random.Random(3))
    secret = random.Random(task.payload["reset"]["seed"]).randrange(5)
    wrong = (secret + 1) % 5
    assert task.prompt == f"Guess.\n\nA number below {secret + 5}."
    environment, other = started(factory, task), started(factory, Task("", {"reset": {"secret": wrong}}))
    assert ask(other, "step", number=wrong).content.startswith("right")
    shown = [ask(environment, "step", number=number).content for number in (wrong, secret, secret)]
    assert shown == ["wrong", f"right\n{OVER}", OVER]
    assert end(environment) == -0.25 + 0.75


def test_row_is_what_the_server_is_reset_by(url: str) -> None:
    factory = load_environment("openenv", {"url": url}, row={"secret": 2})
    task = factory.task_from_row({"secret": 4}, "row 1")
    assert json.loads(str(task.prompt)) == {"text": "A number below 9."}
    environment = started(factory, task)
    assert json.loads(ask(environment, "step", number=4).content.splitlines()[0]) == {"text": "right"}
    assert end(environment) == 0.75


def test_faults_of_the_server_are_observations(url: str) -> None:
    factory = load_environment("openenv", {"url": url, "field": "text"})
    task = factory.make_task(random.Random(0))
    environment = started(factory, task)
    assert ask(environment, "step", number="3").error_kind == "bad_arguments"
    refused = ask(environment, "step", number=8)
    assert (refused.error_kind, json.loads(refused.content)) == ("raised", {"error": "no such door"})
    for last in (7, 9):
        environment = started(factory, task)
        kinds = [ask(environment, "step", number=number).error_kind for number in (last, 1)]
        assert kinds == ["crashed", "crashed"]
        end(environment)


def test_server_without_a_free_session_and_settings_that_do_not_fit_are_one_error(url: str) -> None:
    with served(GuessServer(capacity=1)) as small:
        factory = load_environment("openenv", {"url": small})
        assert factory.example is not None
        first = started(factory, factory.example)
        with pytest.raises(UserError, match="must have a session for each episode.*Server at capacity: 1/1"):
            started(factory, factory.example)
        end(first)
    with pytest.raises(UserError, match="environment.options.url must be an OpenEnv server that runs, got"):
        load_environment("openenv", {"url": "http://127.0.0.1:9"})
    with pytest.raises(UserError, match="environment.options.field must be a field of the observations, got 'txt'"):
        load_environment("openenv", {"url": url, "field": "txt"})
