"""Tasks of other projects, in the formats of theirs, are played by the policy and rewarded by their own tests."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from examples.tasks_of_others import atif
from tests.agentloop.rollouts.test_agent_episodes import folder, play
from tests.fakes.runs import ROOT
from tests.fakes.scripted import call
from tests.replay.conftest import file_store

pytestmark = pytest.mark.slow
__all__ = ["file_store", "folder"]

EXAMPLES = ROOT / "examples/tasks_of_others"
HARBOR = {
    "task.toml": 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 30.0\n[agent]\ntimeout_sec = 30.0\n',
    "instruction.md": "Write the sum of the numbers in /app/numbers into /app/sum.",
    "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nCOPY numbers /app/\n",
    "environment/numbers": "1\n2\n",
    "tests/test.sh": '[ "$(cat /app/sum)" = "$(cat /tests/right)" ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n',
    "tests/right": "3\n",
}


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("echo $(($(head -1 numbers) + $(tail -1 numbers))) > sum", 1.0),
        ("cat /tests/right > sum", 0.0),
        ("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt", 0.0),
    ],
    ids=["solved", "looked at the tests", "rewarded itself"],
)
def test_a_harbor_task_is_rewarded_by_its_own_tests(command: str, reward: float, folder: Path) -> None:
    for name, text in HARBOR.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.parent.chmod(0o755)
        path.write_text(text)

    def says(prompt: str) -> str:
        return "Done." if "<tool_response>" in prompt else call("bash", f'{{"command": "{command}"}}')

    agent = f"{EXAMPLES / 'harbor_task.py'}:solve"
    (episode,), _ = play(agent, says, row={"folder": str(folder)}, max_tokens_per_turn=400)
    assert (episode.stop_reason, episode.environment_reward) == ("answered", reward)
    assert "[exit code " in episode.nodes[-1].messages[0].content


QUIZ = """\
import verifiers
from datasets import Dataset

CODES = {"pearl": "78", "coral": "12"}

def lookup(key: str) -> str:
    \"\"\"Look up the code of a key.\"\"\"
    return CODES[key]

def load_environment():
    rows = [{"question": f"What is the code of {key}?", "answer": code} for key, code in CODES.items()]
    said = lambda completion, answer: float(answer in completion[-1]["content"])
    return verifiers.ToolEnv(dataset=Dataset.from_list(rows), tools=[lookup], rubric=verifiers.Rubric([said]))
"""


@pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed")
def test_an_environment_of_verifiers_plays_its_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key_quiz.py").write_text(QUIZ)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    program = [sys.executable, str(EXAMPLES / "verifiers_environment.py")]
    written = subprocess.run([*program, "key-quiz"], stdout=subprocess.PIPE, text=True, check=True).stdout
    for line, reward in zip(written.splitlines(), (1.0, 0.0), strict=True):
        (episode,), _ = play(
            " ".join(program),
            lambda prompt: "It is 78." if "<tool_response>" in prompt else call("lookup", '{"key": "pearl"}'),
            row=json.loads(line),
        )
        assert (episode.stop_reason, episode.environment_reward, episode.num_turns) == ("answered", reward, 2)
        assert [node.place.fork for node in episode.nodes] == ["new", None]


def _calls(*ids: str) -> list[dict[str, Any]]:
    given = zip(ids, ("pearl", "coral"), strict=True)
    return [{"id": id, "function": {"name": "lookup", "arguments": {"key": key}}} for id, key in given]


SAID: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You look things up."},
        {"role": "user", "content": "Find pearl and coral."},
        {"role": "assistant", "content": "", "reasoning_content": "Both.", "tool_calls": _calls("a", "b"), "weight": 1},
        {"role": "tool", "tool_call_id": "b", "content": "12"},
        {"role": "tool", "tool_call_id": "a", "content": "78"},
        {"role": "assistant", "content": "78 and", "tool_calls": [], "weight": 0},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "78 and 12.", "tool_calls": [], "weight": 1},
    ],
    "tools": [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}],
    "reward": 0.5,
    "success": False,
}


def test_conversations_are_trajectories_of_harbor_and_back() -> None:
    trajectory = atif.write(SAID, "trajectory-1")
    if find_spec("harbor"):
        from harbor.models.trajectories.trajectory import Trajectory

        Trajectory.model_validate(trajectory)
    assert atif.read(trajectory) == SAID
