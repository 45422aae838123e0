"""Workers, the learner, the engine and the database of a run are killed again and again: nothing collected is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentloop.config import RunConfig
from agentloop.config.config_file import load_config
from tests.fakes.postgres_servers import LocalServer
from tests.fakes.run_roles import Roles, kill_all, roles_config
from tests.fakes.runs import ROOT, save_qwen2
from tests.soak.test_quickstart import evaluations, warmed_up_model, worst_log_prob_error
from tests.vllm.environment import EXECUTABLE, missing
from tests.vllm.server import SMALL, SMALL_MACHINE

pytestmark = pytest.mark.soak
ROUNDS = 10
STALENESS = 2


@pytest.fixture(params=["sqlite", "postgres"])
def server(request: pytest.FixtureRequest) -> LocalServer | None:
    """None: the database is a file."""
    return None if request.param == "sqlite" else request.getfixturevalue("own_server")


def database(server: LocalServer | None) -> str | None:
    return None if server is None else server.url(server.new_database(empty=True))


@pytest.mark.timeout(1800)
def test_a_run_outlives_ten_kills_of_each_role(tmp_path: Path, server: LocalServer | None) -> None:
    roles = small_roles(tmp_path, replay={"database": database(server)})
    kill_all(roles, workers=4 if server else 2, rounds=ROUNDS, staleness=STALENESS, server=server)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.timeout(5400)
def test_quickstart_through_vllm_learns_while_all_are_killed(tmp_path: Path, server: LocalServer | None) -> None:
    url = database(server)
    roles = quickstart_roles(tmp_path, *([f"replay.database={url}"] if url else []))
    kill_all(roles, workers=4 if server else 2, rounds=ROUNDS, staleness=STALENESS, server=server)
    assert evaluations(roles.run)[-1] >= 0.9
    # Every stored token is of the version that its row names.
    assert server is not None or worst_log_prob_error(roles.run) < 1e-3


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
