"""Rows that no episode can begin with: named, refused or left out before anything is collected."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentloop.analysis.stored_policies import Asked, evaluate_run
from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.runs.run_folder import config_to_resume
from agentloop.training.train import train
from tests.fakes.processes import assert_same_run, write_config
from tests.fakes.refusals import refusal_of
from tests.fakes.runs import SilentDisplay, StopAfter, small_config
from tests.fakes.shell import Shell

LONG = (4, 11, 20)
"""Numbers, from 1, of rows whose prompt has over 300 tokens more than the others."""


def write_rows(path: Path, *, long: tuple[int, ...] = LONG, without: int = 0) -> str:
    shown = [f"Say {number}. " + "again " * (300 * (number in long)) for number in range(1, 25)]
    rows = [{"prompt": prompt, "answer": "1"} for prompt in shown]
    if without:
        del rows[without - 1]["answer"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config_on(folder: Path, model: Path, data: str, **tasks: Any) -> RunConfig:
    (folder / "rewards.py").write_text("def right(episode, answer): return float(len(episode.answer) % 2 == 0)\n")
    return small_config(
        folder,
        model,
        environment={"name": "rows"},
        reward={"functions": [{"function": f"{folder / 'rewards.py'}:right"}]},
        tasks={"data": data, **tasks},
        context={"max_tokens": 300},
        rollout={"max_turns": 1, "max_tokens_per_turn": 12},
        evaluation={"every": 0, "tasks": 8},
        checkpoint={"every": 1},
    )


def refusal(config: RunConfig, display: SilentDisplay | None = None) -> str:
    return refusal_of(train, config, display=display or SilentDisplay())


def test_rows_that_are_too_long_are_named_and_leave_no_folder(tmp_path: Path, qwen2: Path) -> None:
    display = SilentDisplay()
    text = refusal(config_on(tmp_path, qwen2, write_rows(tmp_path / "rows.jsonl")), display)
    assert text.startswith(
        "tasks.data must hold rows whose first prompt leaves room for a reply within context.max_tokens=300, got "
        "3 of 24 rows too long: row 4, row 11, row 20. Set context.max_tokens above "
    )
    assert text.endswith(", shorten these rows, or leave them out with tasks.too_long: skip.")
    # A prompt of just so many tokens leaves no room, either.
    (longest,) = re.findall(r"Set context.max_tokens above (\d+)", text)
    config = config_on(tmp_path, qwen2, str(tmp_path / "rows.jsonl"))
    context = config.context.model_copy(update={"max_tokens": int(longest)})
    assert "2 of 24 rows too long: row 11, row 20." in refusal(config.model_copy(update={"context": context}))
    assert not list(tmp_path.glob("small-*"))
    assert display.iterations == []


def test_rows_that_all_are_too_long_can_not_be_left_out(tmp_path: Path, qwen2: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", long=tuple(range(1, 25)))
    text = refusal(config_on(tmp_path, qwen2, data, too_long="skip"))
    assert "24 of 24 rows too long: " in text
    assert " and 14 more. Set context.max_tokens above " in text
    assert text.endswith(", shorten these rows.")


def test_column_that_a_reward_needs_is_looked_for_in_every_row(tmp_path: Path, qwen2: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", long=(), without=17)
    text = refusal(config_on(tmp_path, qwen2, data))
    assert text.startswith("tasks.data, row 17: reward.functions must take one argument, the ended episode, and ")


def test_check_tries_every_row_as_the_run_does(shell: Shell, tmp_path: Path, qwen2: Path) -> None:
    for long, without in ((LONG, 0), ((), 17)):
        config = config_on(tmp_path, qwen2, write_rows(tmp_path / "rows.jsonl", long=long, without=without))
        write_config(config, tmp_path / "run.yaml")
        assert shell.refusal(["env", "check", "run.yaml"], tmp_path) == refusal(config)
    unmeasured = ["env", "check", "run.yaml", "--set", "model.path=null"]
    assert shell.refusal(unmeasured, tmp_path) == refusal(config)
    write_rows(tmp_path / "rows.jsonl")
    lines = shell.type(unmeasured, tmp_path)[1].splitlines()
    assert "note: prompts were not measured against context.max_tokens: set model.path" in lines
    lines = shell.type(["env", "check", "run.yaml", "--set", "tasks.too_long=skip"], tmp_path)[1].splitlines()
    assert "note: tasks: left out 3 of 24 rows too long: row 4, row 11, row 20" in lines


@pytest.mark.slow
def test_rows_that_are_left_out_stay_out_in_resumes_and_evaluations(tmp_path: Path, qwen2: Path) -> None:
    data, display = write_rows(tmp_path / "rows.jsonl"), SilentDisplay()
    folders = [tmp_path / name for name in ("broken", "unbroken", "shorter")]
    for folder in folders:
        folder.mkdir()
    broken, unbroken = (config_on(folder, qwen2, data, too_long="skip") for folder in folders[:2])
    result = train(unbroken, display=display)
    (note,) = [note for note in display.notes if "left out" in note]
    assert note == "tasks: left out 3 of 24 rows too long: row 4, row 11, row 20"
    train(broken, display=StopAfter(1))
    assert_same_run(train(broken, resume=True, display=SilentDisplay()).folder, result.folder)
    tasks = evaluate_run(result.folder, Asked(tasks=100)).evaluation.attempts
    assert all(len(row.task) == 64 for row in tasks)
    assert len(tasks) == result.held_out_tasks


# A stopped run goes on with what its error advises


def resumed(folder: Path, *overrides: str, changed: bool = False) -> int:
    config = config_to_resume(folder, overrides)
    result = train(config, resume=True, run=folder, environment_changed=changed, display=SilentDisplay())
    return result.iterations


GROWING = """
from tests.fakes.environments.parity import Parity, Task
class Growing(Parity):
    def make_task(self, rng):
        number = rng.randrange(10**6)
        return Task("again " * (300 * (number % 3 == 2)), {"number": number})
def inverse(episode): return 1.0 / (len(episode.messages[-1].content) % 3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "functions", "advice", "override"),
    [
        ("Growing", [], "Raise it, or shorten the task. Then go on: agentloop train ", "context.max_tokens=2000"),
        ("Parity", ["inverse"], "set reward.on_error: drop. Then go on: agentloop train ", "reward.on_error=drop"),
    ],
)
def test_run_goes_on_with_the_setting_that_its_error_names(
    tmp_path: Path, qwen2: Path, name: str, functions: list[str], advice: str, override: str
) -> None:
    (tmp_path / "mine.py").write_text(GROWING)
    config = small_config(
        tmp_path,
        qwen2,
        environment={"name": f"{tmp_path / 'mine.py'}:{name}"},
        reward={"functions": [{"function": f"{tmp_path / 'mine.py'}:{function}"} for function in functions]},
        context={"max_tokens": 300},
        rollout={"max_turns": 1, "max_tokens_per_turn": 12},
        evaluation={"every": 0, "tasks": 2},
    )
    assert advice in refusal(config)
    (folder,) = tmp_path.glob("small-*")
    with pytest.raises(UserError, match="Then go on: "):
        resumed(folder)
    assert resumed(folder, override) == 3


@pytest.mark.slow
def test_run_goes_on_with_rows_that_were_mended(tmp_path: Path, qwen2: Path) -> None:
    config = config_on(tmp_path, qwen2, write_rows(tmp_path / "rows.jsonl", long=()))
    folder = train(config, display=StopAfter(1)).folder
    write_rows(tmp_path / "rows.jsonl", long=(11,))
    with pytest.raises(UserError, match=r"^tasks\.data must hold rows whose .*, got 1 of 24 rows too long: row 11\."):
        resumed(folder)
    with pytest.raises(UserError, match=r"^tasks\.data must hold the rows that the run had last, got .*-changed"):
        resumed(folder, "tasks.too_long=skip")
    assert resumed(folder, "tasks.too_long=skip", changed=True) == 3
    with pytest.raises(UserError, match=r"^context\.max_tokens must be at least the run's own"):
        resumed(folder, "context.max_tokens=200")
