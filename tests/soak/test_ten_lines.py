"""The quickstart's task, written as functions in a script, is learned as well as its class is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.test_quickstart import evaluations, warmed_up_model

pytestmark = pytest.mark.soak

SCRIPT = '''
import random
import sys

import agentloop
from agentloop.environments import LookupChain


def row(number):
    task = LookupChain().make_task(random.Random(number))
    return {"prompt": [{"role": m.role, "content": m.content} for m in task.prompt], **task.payload}


def lookup(key: str, task: agentloop.Task) -> dict[str, str]:
    """Look up the record of a key."""
    return task.payload["store"].get(key, {"error": "unknown key"})


def right(episode, code):
    return float(episode.answer == f'The code is "{code}".')


agentloop.train(
    model=sys.argv[1],
    tools=[lookup],
    reward=right,
    tasks=[row(number) for number in range(3000)],
    replay={"fraction": 0.25},
    run={"iterations": 20, "folder": sys.argv[2], "seed": int(sys.argv[3])},
    batch={"trajectories": 128, "mini_batch": 64},
    rollout={"max_tokens_per_turn": 40},
    optimizer={"learning_rate": 1.5e-3, "warmup_iterations": 4, "schedule": "cosine", "final_factor": 0.1},
    evaluation={"every": 4, "tasks": 256},
)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmed_up_model(tmp_path_factory.mktemp("warm"))


@pytest.mark.parametrize("seed", range(2))
def test_ten_lines_reach_ninety_percent_of_held_out_tasks(seed: int, tmp_path: Path, model: Path) -> None:
    script = tmp_path / "ten_lines.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, str(model), str(tmp_path), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    success = evaluations(tmp_path / "run-001")
    print(f"seed {seed}: {success[0]:.1%} -> {success[-2]:.1%}, {success[-1]:.1%}")
    assert success[0] <= 0.35
    assert success[-1] >= 0.90
