"""Every algorithm, context strategy, notebook and example learns, through the front door."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from benchmarks.two_agents import AGENTS, learn
from tests.docs.test_notebook import NOTEBOOK, sources
from tests.fakes.runs import STRATEGY_OPTIONS
from tests.soak.test_quickstart import evaluations, metric, quickstart

pytestmark = pytest.mark.soak


def trained(folder: Path, *settings: str, config: str = "quickstart") -> Path:
    run = Path(str(quickstart(folder, *settings, config=config)["folder"]))
    print(f"{settings}: {', '.join(f'{share:.1%}' for share in evaluations(run))}")
    return run


def rise(run: Path) -> float:
    return evaluations(run)[-1] - evaluations(run)[0]


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce++", "dr_grpo", "opo"])
def test_algorithm_raises_held_out_success_by_sixty_points(algorithm: str, warmed_up: Path, tmp_path: Path) -> None:
    settings = f"algorithm={algorithm}", f"model.path={warmed_up}", "run.iterations=40", "run.stop_at_success=0.8"
    assert rise(trained(tmp_path, *settings)) >= 0.60


@pytest.mark.parametrize("seed", range(3))
def test_ppo_raises_held_out_success_by_sixty_points(seed: int, tmp_path: Path) -> None:
    assert rise(trained(tmp_path, f"run.seed={seed}", config="ppo")) >= 0.60


@pytest.mark.parametrize("strategy", STRATEGY_OPTIONS)
def test_strategy_acts_in_half_of_the_episodes_and_learns(strategy: str, tmp_path: Path) -> None:
    options, kind = STRATEGY_OPTIONS[strategy]
    settings = f"context.strategy={strategy}", f"context.options={options}", "run.iterations=16"
    run = trained(tmp_path, *settings, config="strategies")
    # An iteration in which the strategy never acted has no share.
    iterations = len(metric(run, "rollout/success"))
    assert kind is None or sum(metric(run, f"context/rewrites/{kind}")) / iterations >= 0.5
    assert rise(run) >= 0.30


@pytest.mark.parametrize("seed", range(2))
def test_notebook_reaches_ninety_percent_of_held_out_tasks(seed: int, tmp_path: Path, warmed_up: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    script = sources(notebook).replace("../runs/quickstart-001/start", str(warmed_up))
    script = script.replace('"folder": "../runs"', f'"folder": {str(tmp_path)!r}, "seed": {seed}')
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    success = evaluations(tmp_path / "ten-lines-001")
    print(f"seed {seed}: {success[0]:.1%} -> {success[-2]:.1%}, {success[-1]:.1%}")
    assert success[0] <= 0.35
    assert success[-1] >= 0.90


@pytest.mark.parametrize("agent", AGENTS)
def test_agent_of_the_examples_raises_held_out_success_by_thirty_points(agent: str, tmp_path: Path) -> None:
    found = learn(agent, 7, tmp_path)  # data of a seed that no page has
    print(found)
    assert found["after"] - found["before"] >= 0.3
