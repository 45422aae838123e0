"""Unmodified clients learn the quickstart's task through the gateway, with replay, by the commands of their page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.test_gateway_agents import EPISODES, EXAMPLES
from tests.fakes.runs import ROOT
from tests.soak.test_calculator_agent import started
from tests.soak.test_quickstart import evaluations


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("agent", EPISODES)
def test_agent_learns_from_what_it_asks(agent: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    solve = f"{EXAMPLES}/{agent}.py:solve"
    episodes = "600" if agent == "lead_with_scouts" else "2000"  # of six conversations, and of one
    started(tmp_path, "examples.gateway_agents.make_data", "--agent", solve, "--demonstrations", episodes)
    started(tmp_path, "agentloop", "sft", f"{EXAMPLES}/sft.yaml")
    settings = (f"environment.agent={solve}", "model.path=runs/gateway-agents-sft-001/model")
    sets = [part for setting in settings for part in ("--set", setting)]
    started(tmp_path, "agentloop", "train", f"{EXAMPLES}/train.yaml", *sets)
    success = evaluations(tmp_path / "runs/gateway-agents-001")
    print(f"{agent}: held-out success {success[0]:.1%} -> {success[-1]:.1%}")
    assert success[0] <= 0.5
    assert success[-1] >= 0.90
