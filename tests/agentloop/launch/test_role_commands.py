"""The commands of the roles, as a person could type them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from agentloop.cli.main import app
from agentloop.errors import UserError
from agentloop.launch.role_commands import RoleMember, chosen_members, load_run_config, role_members
from agentloop.launch.roles_file import load_roles
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
        metrics_port=9100,
        roles={
            "engine": {"count": 2, "port": 8000, "options": ["--dtype", "float32"]},
            "worker": {"count": 2, "concurrency": 8, "options": ["--wait", "600"]},
        },
    )
    start, config = f"{sys.executable} -m agentloop", ROOT / "configs" / "vllm.yaml"
    assert found == {
        "learner": f"{start} train {config} --set model.path=org/model --set engine.urls=[http://127.0.0.1:8000, "
        "http://127.0.0.1:8001] --run runs/vllm-007 --metrics-port 9100",
        "engine-0": f"{start} engine org/model --run runs/vllm-007 --port 8000 --name policy --max-model-len 8192 "
        "--metrics-port 9101 --dtype float32",
        "engine-1": f"{start} engine org/model --run runs/vllm-007 --port 8001 --name policy --max-model-len 8192 "
        "--metrics-port 9102 --dtype float32",
        "worker-0": f"{start} worker --run runs/vllm-007 --concurrency 8 --metrics-port 9103 --wait 600",
        "worker-1": f"{start} worker --run runs/vllm-007 --concurrency 8 --metrics-port 9104 --wait 600",
    }


def test_what_is_started_are_commands_that_agentloop_has(tmp_path: Path) -> None:
    program: Any = typer.main.get_command(app)
    roles = {"engine": {"options": ["--dtype", "float32"]}, "worker": {"options": ["--wait", "600"]}}
    for member in members(tmp_path, set=["model.path=org/model", "lora.rank=8"], metrics_port=9100, roles=roles):
        name, *words = member.command[3:]
        assert program.commands[name].make_context(name, words).params["metrics_port"] >= 9100


def test_several_ranks_are_started_by_torchrun_which_starts_them_again(tmp_path: Path) -> None:
    found = commands(tmp_path, set=["model.path=org/model"], roles={"learner": {"ranks": 2}})
    assert found["learner"] == (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3 -m -- agentloop "
        f"train {ROOT / 'configs' / 'vllm.yaml'} --set model.path=org/model --run runs/vllm-007"
    )


def test_adapters_and_an_own_command_are_what_the_configuration_and_the_file_say(tmp_path: Path) -> None:
    roles = {"engine": {}, "judge": {"command": ["serve", "{run}", "--port", "{port}", "{index}"], "port": 7000}}
    found = commands(tmp_path, set=["model.path=org/model", "lora.rank=8"], roles=roles)
    assert found["engine-0"].endswith("--lora-rank 8")
    assert found["judge-0"] == "serve runs/vllm-007 --port 7000 0"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"roles": {"engine": {"count": 2}, "judge": {"command": ["x"], "port": 8001}}}, "roles.judge.port must leave"),
        ({"roles": {"engine": {"port": 9101}}, "metrics_port": 9100}, "each port to one, got 9101 which"),
        ({"roles": {"engine": {"port": 65535, "count": 2}}}, "roles.engine.port must leave ports up to 65535 for all"),
    ],
)
def test_a_port_that_two_would_have_is_refused(keys: dict[str, object], expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=expected):
        commands(tmp_path, set=["model.path=org/model"], **keys)


def test_an_engine_needs_a_model_with_a_name(tmp_path: Path) -> None:
    file = tmp_path / "roles.yaml"
    file.write_text(yaml.safe_dump({"config": str(ROOT / "configs" / "quickstart.yaml"), "roles": {"engine": {}}}))
    roles = load_roles(file)
    roles = roles.model_copy(update={"set": ("rollout.engine=vllm",)})
    with pytest.raises(UserError, match="model.path must name a model when roles has an engine, got null"):
        role_members(roles, load_run_config(roles), Path("run"))


def test_members_are_chosen_by_role_or_by_name(tmp_path: Path) -> None:
    file = tmp_path / "roles.yaml"
    config = str(ROOT / "configs" / "quickstart.yaml")
    file.write_text(yaml.safe_dump({"config": config, "roles": {"worker": {"count": 3}}}))
    roles = load_roles(file)
    members = role_members(roles, load_run_config(roles), Path("run"))
    assert [member.name for member in chosen_members(members, ["learner", "worker-2"])] == ["learner", "worker-2"]
    assert len(chosen_members(members, ["worker"])) == 3
    with pytest.raises(UserError, match=r"--only must name roles of the file, got 'engine'. They are: learner, worker"):
        chosen_members(members, ["engine"])
