"""Questions of reasoning-gym are asked and scored by its own programs."""

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentloop.environments import load_environment
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import run_episodes
from tests.fakes.runs import ROOT
from tests.fakes.scripted import call, scripted_actors, shown
from tests.fakes.tiny_actors import run_config

needs_package = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
pytestmark = [pytest.mark.slow, needs_package]


def play(family: str, *scripts: list[str], python: bool = False) -> list[Episode]:
    """Play the same question once with each script, in which {answer} is the family's own answer."""
    from reasoning_gym import create_dataset

    options = {"family": family, "python": python}
    factory = load_environment(f"{ROOT}/examples/benchmarks/reasoning.py:ReasoningGym", options)
    task = factory.make_task(random.Random(0))
    answer = create_dataset(family, seed=task.payload["seed"], size=1)[0]["answer"]
    said = [[reply.replace("{answer}", answer) for reply in script] for script in scripts]
    config = run_config(rollout={"max_tokens_per_turn": 1000}, context={"max_tokens": 20_000})
    return list(run_episodes(scripted_actors(factory, said), [task] * len(said), config))


@pytest.mark.parametrize("family", ["chain_sum", "countdown", "n_queens", "spell_backward", "syllogism"])
def test_an_answer_has_the_score_of_its_family(family: str) -> None:
    right, wrong, bare = play(family, ["It is <answer>{answer}</answer>."], ["<answer>?</answer>"], ["{answer}"])
    assert right.environment_reward == bare.environment_reward == 1
    assert 0 <= wrong.environment_reward < 0.1


def test_an_answer_that_is_code_reaches_no_file(tmp_path: Path) -> None:
    code = f"__import__('pathlib').Path('{tmp_path}/made').touch()"
    tmp_path.chmod(0o777)
    (episode,) = play("countdown", [f"<answer>{code}</answer>"])
    assert episode.environment_reward < 0.1 and not (tmp_path / "made").exists()


def test_the_python_tool_is_offered_where_it_is_asked_for() -> None:
    script = [call("run_python", json.dumps({"code": "print(6 * 7)"})), "<answer>{answer}</answer>"]
    (episode,) = play("chain_sum", script, python=True)
    assert (shown(episode), episode.environment_reward) == (["42"], 1)
    (episode,) = play("chain_sum", script)
    assert list(episode.error_kinds) == ["unknown_tool"]
