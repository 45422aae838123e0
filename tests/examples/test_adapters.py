"""The files to copy for environments of others: behind OpenEnv's protocol, and of Gymnasium."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, RunEnvironments, Task, load_environment
from agentloop.errors import UserError
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import run_episodes
from tests.fakes.openenv_server import GuessServer, served
from tests.fakes.refusals import refusal_of
from tests.fakes.scripted import call, scripted_actors

GYMNASIUM = "examples/adapters/gymnasium_text.py:GymnasiumText"
OPENENV = "examples/adapters/openenv.py:OpenEnv"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(GuessServer()) as url:
        yield url


def play(factory: EnvironmentFactory, *scripts: list[Any], tasks: Sequence[Task] = ()) -> list[Episode]:
    """One episode for each script; what is no text is the argument of the environment's tool."""
    played = [*tasks] or [factory.example or Task("")] * len(scripts)
    tool = [tool["function"]["name"] for tool in factory.tools_for(played[0])]
    replies = [[said if isinstance(said, str) else call(*tool, json.dumps(said)) for said in each] for each in scripts]
    limits = {"max_turns": 20, "max_tokens_per_turn": 500}
    config = RunConfig.model_validate({"rollout": limits, "context": {"max_tokens": 20_000}})
    return list(run_episodes(scripted_actors(factory, replies), played, config))


def ends(episodes: list[Episode]) -> list[tuple[str, float]]:
    return [(episode.stop_reason, episode.environment_reward) for episode in episodes]


def shown(episode: Episode) -> list[str]:
    """What calls and replies were answered."""
    return [message.content for message in episode.messages[1:] if message.role != "assistant"]


def test_action_schema_of_the_server_is_the_tool_of_each_task(url: str) -> None:
    factory = load_environment(OPENENV, {"url": url})
    [tool] = factory.tools_for(factory.example or Task(""))
    function = tool["function"]
    assert (function["name"], function["description"]) == ("step", "Guess the number.")
    assert function["parameters"]["properties"] == {"number": {"type": "integer", "minimum": 0, "maximum": 9}}
    assert function["parameters"]["required"] == ["number"]


@pytest.mark.parametrize("plain_text", [False, True])
def test_episode_is_a_session_whose_rewards_add_up_to_its_end(url: str, plain_text: bool) -> None:
    options = {"url": url, "goal": "Guess.", "field": "text", "plain_text": plain_text}
    factory = load_environment(OPENENV, options)
    task = factory.make_task(random.Random(3))
    secret = random.Random(task.payload["reset"]["seed"]).randrange(5)
    wrong = (secret + 1) % 5
    assert task.prompt == f"Guess.\n\nA number below {secret + 5}."
    said = {number: f" {number}\n" if plain_text else {"number": number} for number in (wrong, secret)}
    tasks = (task, replace(task, payload={"reset": {"secret": wrong}}))
    won, other = play(factory, [said[wrong], said[secret]], [said[wrong]], tasks=tasks)
    assert shown(won) == ["wrong", "right"]
    assert [message.reward for message in won.messages if message.author == "llm"] == [-0.25, 0.75]
    assert ends([won, other]) == [("ended", -0.25 + 0.75), ("ended", 0.75)]


def test_row_is_what_the_server_is_reset_by(url: str) -> None:
    factory = load_environment(OPENENV, {"url": url}, row={"secret": 2})
    task = factory.task_from_row({"secret": 4}, "row 1")
    assert json.loads(str(task.prompt)) == {"text": "A number below 9."}
    [episode] = play(factory, [{"number": 4}], tasks=[task])
    assert [json.loads(text) for text in shown(episode)] == [{"text": "right"}]


def test_faults_of_the_server_are_observations_but_nobody_judges_plain_text_after_its_end(url: str) -> None:
    factory = load_environment(OPENENV, {"url": url, "field": "text"})
    scripts = [[{"number": first}, {"number": then}, "I give up."] for first, then in (("3", 8), (7, 1), (9, 1))]
    refused, *lost = play(factory, *scripts)
    assert refused.error_kinds == ("bad_arguments", "raised")
    assert json.loads(shown(refused)[1]) == {"error": "no such door"}
    assert [episode.error_kinds for episode in lost] == [("crashed", "crashed")] * 2
    assert ends([refused, *lost]) == [("answered", 0.0)] * 3
    [episode] = play(load_environment(OPENENV, {"url": url, "field": "text", "plain_text": True}), ["8", "7"])
    assert (shown(episode), episode.stop_reason) == (["no such door"], "not_judged")


def test_server_without_a_free_session_and_settings_that_do_not_fit_are_one_error(url: str) -> None:
    with served(GuessServer(capacity=1)) as small:
        factory = load_environment(OPENENV, {"url": small})
        with pytest.raises(UserError, match="must have a session for each episode.*Server at capacity: 1/1"):
            play(factory, *[[{"number": 8}] * 9] * 2)
    with pytest.raises(UserError, match="environment.options.url must be an OpenEnv server that runs, got"):
        load_environment(OPENENV, {"url": "http://127.0.0.1:9"})
    with pytest.raises(UserError, match="environment.options.field must be a field of the observations, got 'txt'"):
        load_environment(OPENENV, {"url": url, "field": "txt"})


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


def test_drawn_environment_is_shown_as_text_with_its_colours_in_words() -> None:
    factory = load_environment(GYMNASIUM, LAKE)
    assert factory.example is not None
    assert factory.example.prompt == "Reach G.\n\nS(red)FFF\nFHFH\nFFFH\nHFFG"
    [tool] = RunEnvironments({factory.name: factory}).tools  # the run's parser reads calls of it
    action = {"action": {"type": "string", "enum": MOVES}}
    fixed = {"type": "object", "required": ["action"], "additionalProperties": False}
    assert (tool["function"]["name"], tool["function"]["parameters"]) == ("act", {**fixed, "properties": action})


def test_return_of_the_episode_is_its_reward_and_the_environment_ends_it() -> None:
    moves = ["down", "down", "right", "right", "down", "right"]
    scripts = [[{"action": move} for move in moves], [{"action": "north"}, {"action": "down"}, "I give up."]]
    won, left = play(load_environment(GYMNASIUM, LAKE), *scripts)
    assert shown(won)[0] == shown(left)[1] == "  (Down)\nSFFF\nF(red)HFH\nFFFH\nHFFG"
    assert shown(won)[5].endswith("HFFG(red)") and left.error_kinds == ("bad_arguments",)
    assert ends([won, left]) == [("ended", 1.0), ("answered", 0.0)]
    [in_words] = play(load_environment(GYMNASIUM, {**LAKE, "plain_text": True}), ["Down!", *moves])
    assert shown(in_words) == ["That is no action. The actions are: left, down, right, up.", *shown(won)]
    assert ends([in_words]) == [("ended", 1.0)]


def test_texts_are_actions_and_observations_as_they_are() -> None:
    drawn = load_environment(GYMNASIUM, {"id": "Blackjack-v1", "actions": ["stick", "hit"]}).example
    assert drawn is not None and str(drawn.prompt).startswith("[")  # a tuple of numbers
    factory = load_environment(GYMNASIUM, {"id": "Echo-v0", "plain_text": True})
    assert factory.make_task(random.Random(1)).prompt == factory.make_task(random.Random(1)).prompt
    [episode] = play(factory, ["hello", "stop"])
    assert (shown(episode), episode.environment_reward) == (["hello", "stop"], 0.5)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"id": "NoSuch-v0"}, "environment.options.id must name an environment that Gymnasium can make, got 'NoSuch"),
        ({"id": "Pendulum-v1"}, "environment.options.id must be an environment of Gymnasium with actions of Discrete"),
        ({"id": "FrozenLake-v1", "actions": ["left"]}, "environment.options.actions must have a name of its own for"),
    ],
)
def test_what_can_not_be_played_is_one_error(options: dict[str, Any], problem: str) -> None:
    assert refusal_of(load_environment, GYMNASIUM, options).startswith(problem)
