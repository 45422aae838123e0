"""Workers, the learner, the engine and the database of a run are killed again and again: nothing collected is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentloop.config import RunConfig
from agentloop.config.config_file import load_config
from tests.fakes.postgres_servers import LocalServer
from tests.fakes.run_roles import Roles, kill_all, roles_config
from tests.fakes.runs import ROOT, save_qwen2
from tests.soak.test_quickstart import evaluations, warmed_up_model
from tests.vllm.environment import EXECUTABLE, missing
from tests.vllm.server import SMALL, SMALL_MACHINE

pytestmark = pytest.mark.soak
needs_vllm = pytest.mark.skipif(missing() is not None, reason=str(missing()))
ROUNDS = 10
STALENESS = 2


@pytest.mark.timeout(1800)
def test_a_run_on_sqlite_outlives_ten_kills_of_each_role(tmp_path: Path) -> None:
    kill_all(small_roles(tmp_path), workers=2, rounds=ROUNDS, staleness=STALENESS)


@pytest.mark.timeout(1800)
def test_a_run_on_postgres_outlives_ten_kills_of_each_role(tmp_path: Path, own_server: LocalServer) -> None:
    url = own_server.url(own_server.new_database(empty=True))
    kill_all(
        small_roles(tmp_path, replay={"database": url}),
        workers=4,
        rounds=ROUNDS,
        staleness=STALENESS,
        server=own_server,
    )


@needs_vllm
@pytest.mark.timeout(5400)
def test_quickstart_on_sqlite_through_vllm_learns_while_all_are_killed(tmp_path: Path) -> None:
    roles = quickstart_roles(tmp_path)
    kill_all(roles, workers=2, rounds=ROUNDS, staleness=STALENESS)
    assert evaluations(roles.run)[-1] >= 0.9


@needs_vllm
@pytest.mark.timeout(5400)
def test_quickstart_on_postgres_through_vllm_learns_while_all_are_killed(
    tmp_path: Path, own_server: LocalServer
) -> None:
    url = own_server.url(own_server.new_database(empty=True))
    roles = quickstart_roles(tmp_path, f"replay.database={url}")
    kill_all(roles, workers=4, rounds=ROUNDS, staleness=STALENESS, server=own_server)
    assert evaluations(roles.run)[-1] >= 0.9


def small_roles(folder: Path, **sections: object) -> Roles:
    """A random model and the test server: an iteration is a second."""
    model = save_qwen2(folder / "model")
    run = {"name": "small", "folder": str(folder), "iterations": 60, "seed": 0}
    sections = {"run": run, "evaluation": {"every": 0, "tasks": 8}, **sections}
    given = roles_config(folder, model, {"max_staleness": STALENESS, "lease_s": 3}, **sections)
    return Roles(folder, given, engine_words=["--silence", "10"])


def quickstart_roles(folder: Path, *settings: str) -> Roles:
    """The quickstart through a real vLLM, to its end."""
    overrides = (
        *(f"model.path={warmed_up_model(folder / 'warm-up')}", "rollout.engine=vllm", "context.max_tokens=1024"),
        *('engine.urls=["http://127.0.0.1:1"]', "engine.turn_timeout_s=600", "engine.restart_timeout_s=600"),
        *("collection.by=workers", f"collection.max_staleness={STALENESS}", "collection.lease_s=10"),
        *("loss.fresh.anchor=behavior", "checkpoint.every=1", *settings),
    )
    given: RunConfig = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    words = ["--silence", "15", "--dtype", "float32", "--max-model-len", "2048", "--", *SMALL]
    return Roles(folder, given, vllm=EXECUTABLE, engine_words=words, environment=SMALL_MACHINE)
