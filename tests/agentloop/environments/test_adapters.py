"""Environments of others: behind OpenEnv's protocol, and of Gymnasium."""

import json
import random
from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from agentloop.environments import Environment, EnvironmentFactory, Task, load_environment
from agentloop.environments.adapters.openenv import OpenEnv
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


# Gymnasium


MOVES = ["left", "down", "right", "up"]
LAKE = {"id": "FrozenLake-v1", "arguments": {"is_slippery": False}, "actions": MOVES, "goal": "Reach G."}


class Echo(gymnasium.Env[str, str]):
    """Says back what it is told, and ends at `stop`."""

    observation_space = spaces.Text(100)
    action_space = spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"secret{self.np_random.integers(10)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return action, 0.25, action == "stop", False, {}


gymnasium.register("Echo-v0", Echo)


def play(factory: EnvironmentFactory, *actions: str) -> tuple[float, list[str]]:
    """The reward, and what was shown of each action."""
    environment = factory.create()
    assert factory.example is not None
    environment.start(factory.example)
    shown = [ask(environment, "act", action=action).content for action in actions]
    return environment.reward(Task("x"), [Message("assistant", "done", author="llm")]), shown


def test_drawn_environment_is_shown_as_text_with_its_colours_in_words() -> None:
    factory = load_environment("gymnasium", LAKE)
    assert factory.example is not None
    assert factory.example.prompt == "Reach G.\n\nS(red)FFF\nFHFH\nFFFH\nHFFG"
    [tool] = factory.tools
    assert tool["function"]["name"] == "act"
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {"action": {"type": "string", "enum": MOVES}},
        "required": ["action"],
    }


def test_return_of_the_episode_is_its_reward_and_its_end_is_said() -> None:
    factory = load_environment("gymnasium", LAKE)
    reward, shown = play(factory, "down", "down", "right", "right", "down", "right", "left")
    assert shown[0] == "  (Down)\nSFFF\nF(red)HFH\nFFFH\nHFFG"
    assert shown[5].endswith(f"HFFG(red)\n{OVER}") and shown[6] == OVER
    assert (reward, play(factory, "down")[0]) == (1.0, 0.0)


def test_texts_are_actions_and_observations_as_they_are() -> None:
    drawn = load_environment("gymnasium", {"id": "Blackjack-v1", "actions": ["stick", "hit"]}).example
    assert drawn is not None and str(drawn.prompt).startswith("[")  # a tuple of numbers
    factory = load_environment("gymnasium", {"id": "Echo-v0"})
    assert factory.make_task(random.Random(1)).prompt == factory.make_task(random.Random(1)).prompt
    assert play(factory, "hello", "stop") == (0.5, ["hello", f"stop\n{OVER}"])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"id": "NoSuch-v0"}, "environment.options.id must name an environment that Gymnasium can make, got 'NoSuch"),
        ({"id": "Pendulum-v1"}, "environment.options.id must be an environment of Gymnasium with actions of Discrete"),
        ({"id": "FrozenLake-v1", "actions": ["left"]}, "environment.options.actions must have a name of its own for"),
    ],
)
def test_what_can_not_be_played_is_one_error(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        load_environment("gymnasium", options)
    assert str(caught.value).startswith(problem)
