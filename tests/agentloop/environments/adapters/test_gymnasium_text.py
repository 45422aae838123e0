"""Gymnasium's environments: seeds are tasks, steps are calls, and the return is the reward."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from agentloop.environments import EnvironmentFactory, Task, load_environment
from agentloop.errors import UserError
from context.messages import Message
from tests.fakes.environments.faulty_tools import ask

MOVES = ["left", "down", "right", "up"]
LAKE = {"id": "FrozenLake-v1", "arguments": {"is_slippery": False}, "actions": MOVES, "goal": "Reach G."}
OVER = "The episode is over. Answer to end it."


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
