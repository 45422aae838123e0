"""A file of roles: the commands that it stands for, and what is wrong with it by line and key."""

import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from agentloop.cli.main import app
from agentloop.errors import UserError
from agentloop.launch.roles import (
    EngineRole,
    LearnerRole,
    RoleMember,
    WorkerRole,
    load_roles,
    load_run_config,
    role_members,
)
from agentloop.launch.supervision import assigned_devices
from tests.fakes.refusals import refusal_of
from tests.fakes.runs import ROOT


def members(folder: Path, **keys: object) -> list[RoleMember]:
    file = folder / "roles.yaml"
    file.write_text(yaml.safe_dump({"config": str(ROOT / "configs" / "vllm.yaml"), **keys}))
    roles = load_roles(file)
    return role_members(roles, load_run_config(roles), Path("runs/vllm-007"))


def commands(folder: Path, **keys: object) -> dict[str, str]:
    """What is started, by name."""
    return {member.name: " ".join(member.command) for member in members(folder, **keys)}


def test_learner_engines_and_workers_are_given_the_run_the_model_and_ports_of_their_own(tmp_path: Path) -> None:
    found = commands(
        tmp_path,
        set=["model.path=org/model"],
        roles={
            "engine": {"count": 2, "port": 8000, "options": ["--dtype", "float32"]},
            "worker": {"count": 2, "concurrency": 8, "options": ["--wait", "600"]},
        },
    )
    start, config = f"{sys.executable} -m agentloop", ROOT / "configs" / "vllm.yaml"
    assert found == {
        "learner": f"{start} train {config} --set model.path=org/model --set engine.urls=[http://127.0.0.1:8000, "
        "http://127.0.0.1:8001] --run runs/vllm-007",
        "engine-0": f"{start} engine org/model --run runs/vllm-007 --port 8000 --max-model-len 8192 --dtype float32",
        "engine-1": f"{start} engine org/model --run runs/vllm-007 --port 8001 --max-model-len 8192 --dtype float32",
        "worker-0": f"{start} worker --run runs/vllm-007 --concurrency 8 --wait 600",
        "worker-1": f"{start} worker --run runs/vllm-007 --concurrency 8 --wait 600",
    }


def test_started_commands_are_commands_of_agentloop(tmp_path: Path) -> None:
    program: Any = typer.main.get_command(app)
    roles = {"engine": {"options": ["--dtype", "float32"]}, "worker": {"options": ["--wait", "600"]}}
    for member in members(tmp_path, set=["model.path=org/model", "lora.rank=8"], roles=roles):
        name, *words = member.command[3:]
        assert program.commands[name].make_context(name, words).params


def test_ranks_adapters_and_own_commands_are_what_the_configuration_and_the_file_say(tmp_path: Path) -> None:
    judge = {"command": ["serve", "{run}", "--port", "{port}", "{index}"], "port": 7000}
    sets = ["model.path=org/model", "lora.rank=8"]
    found = commands(tmp_path, set=sets, roles={"engine": {}, "judge": judge, "learner": {"ranks": 2}})
    assert found["engine-0"].endswith("--lora-rank 8")
    assert found["judge-0"] == "serve runs/vllm-007 --port 7000 0"
    assert found["learner"].startswith(
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3 -m -- agentloop "
        f"train {ROOT / 'configs' / 'vllm.yaml'} --set model.path=org/model --set lora.rank=8 "
    )


def test_engine_without_a_model_is_refused(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "quickstart.yaml")
    with pytest.raises(UserError, match="model.path must name a model when roles has an engine, got null"):
        commands(tmp_path, set=["rollout.engine=vllm"], roles={"engine": {}}, config=config)


def test_gpus_are_given_once_each_in_order() -> None:
    members = [
        RoleMember("engine", "engine-0", ("x",), EngineRole(gpus=2)),
        RoleMember("engine", "engine-1", ("x",), EngineRole(gpus=1)),
        RoleMember("worker", "worker-0", ("x",), WorkerRole()),
    ]
    assert assigned_devices(members, {"CUDA_VISIBLE_DEVICES": "4,5,7"}) == {
        "engine-0": {"CUDA_VISIBLE_DEVICES": "4,5"},
        "engine-1": {"CUDA_VISIBLE_DEVICES": "7"},
        "worker-0": {"CUDA_VISIBLE_DEVICES": ""},
    }
    with pytest.raises(UserError, match=r"roles must fit this machine's 1 GPUs, got 3 \(engine-0 2, engine-1 1\)"):
        assigned_devices(members, {"CUDA_VISIBLE_DEVICES": "0"})
    assert assigned_devices(members[2:], {}) == {}


def test_missing_role_settings_have_defaults_and_the_learner_is_always_there(tmp_path: Path) -> None:
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
        ("config: a\nroles:\n  worker: {count: 0}", 3, "roles.worker.count must be greater than or equal to 1, got 0."),
        ("config: a\nroles: {worker: {ranks: 2}}", 2, "roles.worker.ranks must be a known key, got an unknown one."),
        ("config: a\nroles: {learner: {count: 2}}", 2, "roles.learner.count must be 1, got 2."),
        ("config: a\nroles: {judge: {count: 2}}", 2, "roles.judge.command must be given, got nothing."),
        ("config: a\nworker: {}", 2, "worker must be a known key, got an unknown one. See "),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_its_place(text: str, line: int, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "roles.yaml"
    file.write_text(text)
    assert refusal_of(load_roles, file).startswith(f"{file}{f':{line}' if line else ''}: {expected}")


def test_the_example_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    roles = load_roles(Path("configs/cluster.yaml"))
    assert role_members(roles, load_run_config(roles), Path("run"))[0].name == "learner"
