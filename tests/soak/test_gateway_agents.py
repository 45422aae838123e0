"""Unmodified clients learn the quickstart's task through the gateway, with replay, by the commands of their page."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.examples.test_gateway_agents import EPISODES, EXAMPLES
from tests.fakes.runs import ROOT, rows
from tests.soak.test_calculator_agent import started
from tests.soak.test_quickstart import evaluations, metric
from tests.vllm.server import KEY, missing, real_engine

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

START = "runs/gateway-agents-sft-001/model"
SEEDS = {"local": 0, "vllm": 1}


@pytest.fixture(scope="module", params=EPISODES)
def agent(request: pytest.FixtureRequest) -> str:
    return f"{EXAMPLES}/{request.param}.py:solve"


@pytest.fixture(scope="module")
def folder(agent: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that imitates a colleague who is careless with this agent."""
    folder = tmp_path_factory.mktemp("agent")
    (folder / "examples").symlink_to(ROOT / "examples")
    fewer = ("--demonstrations", "600") if "scouts" in agent else ()  # of six conversations each
    started(folder, "examples.gateway_agents.make_data", "--agent", agent, *fewer)
    started(folder, "agentloop", "sft", f"{EXAMPLES}/sft.yaml")
    return folder


@pytest.mark.parametrize("engine", SEEDS)
def test_agent_learns(agent: str, engine: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "vllm" and missing() is not None:
        pytest.skip(str(missing()))
    monkeypatch.setenv("AGENTLOOP_ENGINE_KEY", KEY)
    run, settings = tmp_path / "gateway-agents-001", [f"environment.agent={agent}", f"run.seed={SEEDS[engine]}"]
    settings += [f"model.path={START}", f"run.folder={tmp_path}"]
    with ExitStack() as until_trained:
        if engine == "vllm":
            control = until_trained.enter_context(real_engine(folder / START, tmp_path))
            settings += ["rollout.engine=vllm", f'engine.urls=["{control.url}"]']
        sets = [part for setting in settings for part in ("--set", setting)]
        started(folder, "agentloop", "train", f"{EXAMPLES}/train.yaml", *sets)
    success, gap = evaluations(run), max(metric(run, "actor/fresh/token_gap_max"))
    print(f"{agent} over {engine}: held-out success {success[0]:.1%} -> {success[-1]:.1%}; gap at most {gap:.1e} nats")
    assert success[0] <= 0.5
    assert success[-1] >= 0.90
    assert gap < 1e-3
    assert rows(run / "replay.sqlite", "select count(*) > 0 from draws where stream = 'replay'") == [(1,)]
