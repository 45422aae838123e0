"""Several environments in one run: tasks know theirs, and mistakes are said of the right one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentloop.config.config_file import load_config, load_plain
from agentloop.environments import Task, open_tasks
from agentloop.errors import UserError
from tests.fakes.environments import ENVIRONMENTS

PARITY = f"{ENVIRONMENTS / 'parity.py'}:Parity"
THREE: dict[str, Any] = {
    "easy": {"share": 0.5, "options": {"hops": [1, 2]}},
    "hard": {"share": 0.3, "options": {"hops": [3, 3]}},
    "parity": {"share": 0.2, "name": PARITY, "task_pool": 5},
}


def opened(environments: dict[str, Any] = THREE) -> Any:
    return open_tasks(load_plain({"environments": environments}, source="test"))


def test_tasks_and_held_out_tasks_go_round_and_say_which_environment_they_are_of() -> None:
    environments, source = opened()
    tasks = [source.train(number) for number in range(6)]
    assert [task.environment for task in tasks] == ["easy", "hard", "parity"] * 2
    factories = [environments.of(task) for task in tasks[:3]]
    assert [factory.name for factory in factories] == ["easy", "hard", "parity"]
    assert [factory.options.get("hops") for factory in factories] == [(1, 2), (3, 3), None]
    hashes = {environments.task_hash(task) for task in tasks}
    assert hashes == {factory.task_hash(task) for factory, task in zip(factories * 2, tasks, strict=True)}

    # Each makes the tasks that it makes alone.
    _, alone = opened({"hard": THREE["hard"]})
    assert [source.train(number * 3 + 1) for number in range(3)] == [alone.train(number) for number in range(3)]
    held_out = source.held_out(7)
    assert [task.environment for task in held_out] == [*["easy", "hard", "parity"] * 2, "easy"]
    assert source.held_out(4) == held_out[:4]


def test_source_covers_each_and_a_row_is_of_the_one_of_its_name_and_version() -> None:
    environments, _ = opened()
    assert environments.source != opened({"easy": THREE["easy"]})[0].source
    assert environments.recorded("hard", "1") is environments.of(Task("", environment="hard"))
    assert environments.recorded("hard", "2") is None
    assert environments.recorded("lookup_chain", "1") is None
    changed = environments.with_version_of("abcdef0123")
    assert {factory.version for factory in changed.all} == {"1+abcdef01"}


@pytest.mark.parametrize(
    ("environments", "problem"),
    [
        ("{a: {share: 0}}", "environments.a.share must be greater than 0, got 0. See configs/reference.yaml."),
        ("{a: {share: 1, tasks: {split: x}}}", "environments.a.tasks.split must be left at null when "),
        ("{a: {share: 1, taks: {}}}", "environments.a.taks must be a known key, got an unknown one. See "),
        ("{a: {share: 1, name: rows}}", "environments.a.tasks.data must be given when environments.a.name is rows"),
        ("{a b: {share: 1}}", "environments.a b must match pattern '^[A-Za-z0-9_-]{1,64}$', got 'a b'."),
    ],
)
def test_setting_that_is_wrong_is_said_of_its_environment(tmp_path: Path, environments: str, problem: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{seed: 1}}\nenvironments: {environments}\n")
    with pytest.raises(UserError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}:2: {problem}")
    with pytest.raises(UserError, match="environments.a.options must be arguments of lookup_chain, got 'hop'."):
        opened({"a": {"share": 1, "options": {"hop": 1}}})
