"""Games of TextWorld, played through the episode loop and judged by the games themselves."""

import json
import random
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, load_environment
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import run_episodes
from examples.benchmarks.textworld_data import demonstration
from tests.fakes.runs import ROOT
from tests.fakes.scripted import call, scripted_actors

textworld = pytest.importorskip("textworld", reason="textworld is not installed: pip install textworld==1.7.0")

MANY = [3, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
NO_COMMANDS = ["quit", "Restart", "save", "script", "look. restart", "look then quit", "oops", "x" * 999, "\x00", "🎉"]
INFOS = textworld.EnvInfos(feedback=True, admissible_commands=True, policy_commands=True)


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("games")


def loaded(games: Path, **options: Any) -> EnvironmentFactory:
    name = f"{ROOT / 'examples/benchmarks/textworld_games.py'}:TextWorldGames"
    return load_environment(name, {"folder": str(games), **options}, row={"seed": 0})


def play(factory: EnvironmentFactory, scripts: Sequence[Sequence[str]], max_turns: int) -> list[Episode]:
    """Script k plays the game of seed k."""
    limits = {"max_turns": max_turns, "max_tokens_per_turn": 2000}
    config = RunConfig.model_validate({"rollout": limits, "context": {"max_tokens": 20_000}})
    tasks = [factory.task_from_row({"seed": seed}, "a row") for seed in range(len(scripts))]
    return list(run_episodes(scripted_actors(factory, scripts), tasks, config))


def opened(games: Path, seed: int, factory: EnvironmentFactory) -> tuple[Any, Any]:
    """A game and its first state; nothing of it is ours but its file."""
    factory.task_from_row({"seed": seed}, "a row")
    [file] = games.glob(f"*/rooms2-objects4-quests2-length2-seed{seed}/game.z8")
    game = textworld.start(str(file), INFOS)
    return game, game.reset()


def random_commands(games: Path, seed: int, factory: EnvironmentFactory) -> tuple[list[str], float]:
    """What a random player says, and the share of the points that the game then tells it when asked."""
    rng, said, over = random.Random(seed), list[str](), False
    game, state = opened(games, seed, factory)
    while not over and len(said) < 8:
        if rng.random() < 0.2:
            said.append(rng.choice(NO_COMMANDS))  # nothing that the game is told
            continue
        said.append(rng.choice([*state.admissible_commands, *state.policy_commands[:1] * 4, "take all", "go up"]))
        state, _, over = game.step(said[-1])
    if not over:
        state, _, _ = game.step("score")
    ((score, most),) = re.findall(r"scored (\d+) out of a possible (\d+)", state.feedback)
    return said, int(score) / int(most)


@pytest.mark.parametrize("count", MANY)
def test_walkthroughs_win_their_games(games: Path, count: int) -> None:
    factory = loaded(games)
    scripts = [opened(games, seed, factory)[1].policy_commands for seed in range(count)]
    for episode, script in zip(play(factory, scripts, 20), scripts, strict=True):
        assert (episode.stop_reason, episode.environment_reward, episode.num_turns) == ("ended", 1.0, len(script))
        assert sum(message.reward or 0 for message in episode.messages) == 1.0


@pytest.mark.parametrize("count", MANY)
def test_random_players_have_the_score_that_the_game_tells_in_words_and_by_calls(games: Path, count: int) -> None:
    factory = loaded(games)
    played = [random_commands(games, seed, factory) for seed in range(count)]
    scripts = [[f"I think I will\n{command}" for command in said] for said, _ in played]
    calls = [[call("act", json.dumps({"command": command})) for command in said] for said, _ in played]
    in_words = play(factory, [[*said, *["look"] * 9] for said in scripts], 9)
    by_calls = play(loaded(games, as_tool=True), [[*said, "I give up."] for said in calls], 9)
    for words, tool, (said, score) in zip(in_words, by_calls, played, strict=True):
        assert words.environment_reward == tool.environment_reward == score
        rewards = [[m.reward for m in episode.messages if m.author == "llm"][: len(said)] for episode in (words, tool)]
        assert rewards[0] == rewards[1] and sum(rewards[0]) == score


def test_what_is_no_command_never_reaches_the_game(
    games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # `save` and `script` would write here
    (episode,) = play(loaded(games, show_commands=True), [[*NO_COMMANDS, "", "look", "look"]], 13)
    answers = [message.content for message in episode.messages if message.role == "user"]
    listed = answers[0].partition("You can: ")[2]
    assert "examine " in listed and answers[1:-1] == [f"That is no command of this game.\n\nYou can: {listed}"] * 11
    assert answers[-1].startswith("-= ") and [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("as_tool", [False, True])
def test_demonstrations_end_with_the_last_command(games: Path, as_tool: bool) -> None:
    factory = loaded(games, as_tool=as_tool)
    line = demonstration(factory, factory.task_from_row({"seed": 0}, "a row"))
    assert (line["messages"][-1]["role"], len(line["tools"])) == ("assistant", as_tool)


def _opening(folder: str) -> str:
    return str(loaded(Path(folder)).example)


def test_processes_that_want_one_game_at_once_get_the_same_and_leave_nothing_else(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2) as processes:
        one, other = processes.map(_opening, [str(tmp_path)] * 2)
    assert one == other
    (game,) = tmp_path.glob("*/*")
    assert sorted(path.name for path in game.iterdir()) == ["game.json", "game.ni", "game.z8", "opening.json"]
