"""`agentloop env check | play | demonstrate`: an environment looked at without a model, and episodes in it."""

import json
from pathlib import Path

import pytest

from agentloop.config.config_file import load_plain
from agentloop.models.loading import load_model
from agentloop.supervised.demonstrations import compare_with_environment, read_demonstrations
from agentloop.training.train import train
from tests.docs.blocks import ROOT
from tests.fakes.runs import PARITY, SilentDisplay, small_config
from tests.fakes.shell import Shell

LIBRARY = f"{ROOT / 'examples' / 'library.py'}:Library"
CALCULATOR = f"{ROOT / 'examples' / 'calculator.py'}:Calculator"
TWICE = """
from agentloop import Environment, Message, Task

class Twice(Environment):
    asked = 0

    def __init__(self, number: int = 7):
        self.number = number

    def make_task(self, rng):
        return Task("Say it.", {"number": self.number})

    def reward(self, task, messages):
        type(self).asked += 1
        return float(type(self).asked)

    def demonstrate(self, task, messages, rng):
        raise KeyError("script")
"""


def test_check_shows_tools_as_the_model_is_given_them_a_task_and_rewards(shell: Shell, tmp_path: Path) -> None:
    code, output, errors = shell.type(["env", "check", CALCULATOR], tmp_path)
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[:3] == [f"environment   {CALCULATOR}, version 1", "defines       reward, make_task", "tools         1"]
    (given,) = [line.partition(": ")[2] for line in lines if line.startswith("  as the model is given it: ")]
    function = json.loads(given)["function"]
    assert (function["name"], function["description"]) == ("multiply", "Multiply two whole numbers.")
    assert function["parameters"]["required"] == ["a", "b"]
    assert "rewards       0 for an empty reply" in lines
    assert lines[-1].startswith("note: there is no demonstrate: ")
    sets = ["--set", "model.path=mine", "--set", "rollout.success_reward=0"]
    lines = shell.type(["env", "check", CALCULATOR, *sets], tmp_path)[1].splitlines()
    assert lines[-1] == "note: an empty reply is a success already, with reward 0: look at the reward"


def test_check_plays_a_whole_dialogue_where_a_demonstrator_can(shell: Shell, tmp_path: Path) -> None:
    desk = f"{ROOT / 'examples/shop_agent/service_desk.py'}:ServiceDesk"
    lines = shell.type(["env", "check", desk], tmp_path)[1].splitlines()
    assert lines[1] == "defines       reward, make_task, start, respond, demonstrate, rewards_every_end"
    played = lines[lines.index("demonstrated  100% of demonstrations are a success") + 1 : -1]
    assert [line.split(" ")[2] for line in played[:3]] == ["assistant:", "user:", "assistant:"]
    assert any(line.startswith("  tool look_up_order: ") for line in played) and played[-1].startswith("  assistant: ")


def test_check_as_json_says_the_same(shell: Shell, tmp_path: Path) -> None:
    found = json.loads(shell.type(["env", "check", LIBRARY, "--json"], tmp_path)[1])
    assert found["methods"] == ["reward", "make_task", "start", "close", "demonstrate"]
    assert (found["demonstrated"], found["empty_rewards"]) == (1.0, [0.0, 0.0])
    assert found["example"]["messages"][1]["content"] == "How many books are there?"
    assert found["different"] < 100
    assert found["remarks"][0] == "tool count does not say what prefix means: write Args: in its docstring"


def test_check_takes_options_and_rows(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE.replace("raise KeyError", "return Message('assistant', '') #"))
    sets = ["--set", "environment.options.number=9"]
    found = json.loads(shell.type(["env", "check", "twice.py:Twice", *sets, "--json"], tmp_path)[1])
    assert found["example"]["payload"] == {"number": 9}
    assert found["remarks"][0] == "there is no tool: the policy can only answer"
    assert found["remarks"][1] == "of 100 tasks 1 are different, and 256 held-out ones are among them"
    assert found["remarks"][2].startswith("reward is not the same for the same conversation: ")
    problems = f"{ROOT / 'examples' / 'word_problems.py'}:WordProblems"
    rows = ["--set", f"tasks.data={ROOT / 'examples' / 'word_problems.jsonl'}"]
    assert " held out" in json.loads(shell.type(["env", "check", problems, *rows, "--json"], tmp_path)[1])["rows"]


def test_check_says_of_an_agent_only_what_is_known_before_it_asks(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(40)))
    (tmp_path / "run.yaml").write_text("environment: {agent: ./mine}\ntasks: {data: tasks.jsonl}\nmodel: {path: m}\n")
    lines = shell.type(["env", "check", "run.yaml"], tmp_path)[1].splitlines()
    assert lines[:2] == ["environment   agent, version 1", "agent         ./mine"]
    assert [line.split()[0] for line in lines[2:]] == ["tasks", "user:", "payload:", "note:", "note:"]
    assert lines[-2] == "note: the agent was not started: env play lets a model play an episode through it"
    assert lines[-1] == "note: ./mine is no program of this machine: install it, or give its path"
    there = shell.type(["env", "check", "run.yaml", "--set", "environment.agent=sh mine"], tmp_path)[1].splitlines()
    assert there[-1] == lines[-2]


def test_demonstrations_are_written_as_sft_reads_them(shell: Shell, tmp_path: Path, qwen2: Path) -> None:
    asked = ["env", "demonstrate", LIBRARY, "--tasks", "30", "--to", "d.jsonl"]
    code, output, _ = shell.type(asked, tmp_path)
    assert code == 0 and output.startswith("wrote d.jsonl: 30 demonstrations of ") and ", 30 of them a suc" in output
    config = load_plain(
        {"environment": {"name": LIBRARY}, "context": {"max_tokens": 2000}, "sft": {"data": str(tmp_path / "d.jsonl")}}
    )
    assert compare_with_environment(config) is None
    found = read_demonstrations(tmp_path / "d.jsonl", config, load_model(config.model, qwen2), key="sft.data")
    assert (len(found.read), found.too_long, dict(found.ignored)) == (30, 0, {})
    assert "FILE must not exist, got 'd.jsonl'." in shell.refusal(asked, tmp_path)
    assert "Calculator must define demonstrate" in shell.refusal(
        ["env", "demonstrate", CALCULATOR, *asked[3:]], tmp_path
    )


FUNCTIONS = """
def double(number: int) -> int:
    'Twice a number.'
    return 2 * number

def right(episode, answer):
    return float(episode.answer == answer) + 0.25 * episode.num_tool_calls

def raising(episode):
    return 1 / 0
"""


def functions(folder: Path, reward: str) -> str:
    (folder / "functions.py").write_text(FUNCTIONS)
    offered: list[list[str]] = [["double"], []]  # not to every second row
    asked = [{"prompt": f"Twice {number}?", "answer": str(2 * number)} for number in range(40)]
    rows = [json.dumps({**row, "tools": offered[number % 2]}) for number, row in enumerate(asked)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "train.yaml").write_text(
        f"environment: {{name: rows, tools: ['functions.py:double']}}\n"
        f"reward: {{functions: ['functions.py:{reward}']}}\ntasks: {{data: rows.jsonl}}\n"
    )
    return "train.yaml"


def test_functions_are_tried_by_the_file_of_their_run(shell: Shell, tmp_path: Path) -> None:
    config = functions(tmp_path, "right")
    found = json.loads(shell.type(["env", "check", config, "--json"], tmp_path)[1])
    names = [tool["function"]["name"] for tool in found["tools"]]
    assert (names, found["sets_of_tools"], found["empty_rewards"]) == (["double"], 2, [0.0, 0.0])
    said = shell.type(["env", "check", config], tmp_path)[1]
    assert "tools         1, of which this task offers 1; 2 sets in 100 tasks\n" in said


TWO = "environments:\n  near: {name: lookup_chain, share: 1}\n  far: {name: lookup_chain, share: 1}\n"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("twice.py:Twice", "Twice.demonstrate must bring its episodes to an answer, got KeyError: 'script' at"),
        ("raising", "must return a finite number for every episode, got ZeroDivisionError: division by zero at "),
        ("two.yaml", "CONFIG must have one environment, got 2. Name one of them."),
    ],
)
def test_check_refuses_what_would_stop_a_run(shell: Shell, tmp_path: Path, environment: str, message: str) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    (tmp_path / "two.yaml").write_text(TWO)
    asked = functions(tmp_path, environment) if environment == "raising" else environment
    refusal = shell.refusal(["env", "check", asked], tmp_path)
    assert message in refusal and "--resume" not in refusal


def test_model_and_newest_policy_play_in_an_environment_or_by_a_file(shell: Shell, tmp_path: Path, qwen2: Path) -> None:
    settings = small_config(tmp_path / "runs", qwen2, run={"iterations": 1}, evaluation={"tasks": 1})
    train(settings, display=SilentDisplay())
    config = tmp_path / functions(tmp_path, "right")
    config.write_text(config.read_text() + "rollout: {max_tokens_per_turn: 8, max_turns: 1}\n")
    sets = ["--set", "rollout.max_tokens_per_turn=8", "--set", "rollout.max_turns=1", "--task", "3"]
    for model in (qwen2, "runs/small-001"):
        first, again = (shell.type(["env", "play", PARITY, "--model", model, *sets], tmp_path) for _ in range(2))
        assert (first[0], first[1]) == (0, again[1])
        lines = first[1].splitlines()
        assert lines[0].startswith("user: Say something of even length, number ") and " reward " in lines[-1]
        code, output, _ = shell.type(["env", "play", "train.yaml", "--model", model], tmp_path)
        assert (code, output.splitlines()[0][:12]) == (0, "user: Twice ")
    own = shell.type(
        ["env", "play", "runs/small-001", "--set", "rollout.max_tokens_per_turn=8", "--task", "3"], tmp_path
    )
    assert (own[0], own[1].splitlines()[0]) == (0, lines[0])
    assert "--model must be given but for a run's folder, got none for" in shell.refusal(
        ["env", "play", PARITY], tmp_path
    )
    config.write_text(config.read_text() + "context: {max_tokens: 16}\n")
    code, _, errors = shell.type(["env", "play", "train.yaml", "--model", qwen2], tmp_path)
    assert (code, errors.splitlines()[0].split(":")[0]) == (2, "computing on cpu")
    assert "context.max_tokens must leave room for a reply, got a first prompt of " in errors.splitlines()[-1]
