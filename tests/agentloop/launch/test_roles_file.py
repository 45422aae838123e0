"""A file of roles says what is wrong with it by its line and its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentloop.errors import UserError
from agentloop.launch.role_commands import load_run_config, role_members
from agentloop.launch.roles_file import EngineRole, LearnerRole, load_roles
from tests.fakes.runs import ROOT


def test_what_is_left_out_has_a_default_and_the_learner_is_always_there(tmp_path: Path) -> None:
    file = tmp_path / "roles.yaml"
    file.write_text("config: a.yaml\nroles:\n  engine:\n    # port: 8000\n  judge: {command: [a, b], count: 2}\n")
    roles = load_roles(file).roles.by_name
    assert list(roles) == ["learner", "engine", "judge"]
    assert roles["learner"] == LearnerRole() and roles["engine"] == EngineRole()
    assert (roles["judge"].command, roles["judge"].count) == (("a", "b"), 2)


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("roles: {}", 0, "config must be given, got nothing."),
        (
            "config: a\nroles:\n  worker: {count: 0}",
            3,
            "roles.worker.count must be a whole number of at least 1, got 0.",
        ),
        ("config: a\nroles: {worker: {ranks: 2}}", 2, "roles.worker.ranks must be a known key, got an unknown one."),
        ("config: a\nroles: {worker: 3}", 2, "roles.worker must be a mapping of keys, got 3."),
        ("config: a\nroles: {learner: {count: 2}}", 2, "roles.learner.count must be 1, got 2."),
        ("config: a\nroles: {judge: {count: 2}}", 2, "roles.judge.command must be given, got nothing."),
        ("config: a\nroles: {A-b: {command: [x]}}", 2, "roles must have names of lower-case letters and _, got 'A-b'."),
        ("config: a\nworker: {}", 2, "worker must be a known key, got an unknown one. The keys: config, set, roles,"),
        ("config: a\nmetrics_port: x", 2, "metrics_port must be a whole number from 1 to 65535 or null, got x."),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(text: str, line: int, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "roles.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        load_roles(file)
    assert str(refused.value).startswith(f"{file}{f':{line}' if line else ''}: {expected}")


def test_the_example_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    roles = load_roles(Path("configs/cluster.yaml"))
    assert role_members(roles, load_run_config(roles), Path("run"))[0].name == "learner"
