"""Runs with several environments: exact shares, whole groups, and each one's figures apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentloop.analysis.stored_policies import evaluate_run
from agentloop.config import RunConfig
from agentloop.rollouts.evaluation import as_table
from agentloop.training.from_python.train_result import TrainResult
from agentloop.training.train import train
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.runs import SilentDisplay, StopAfter, rows, small_config

pytestmark = pytest.mark.slow

PARITY = f"{ENVIRONMENTS / 'parity.py'}:Parity"
THREE: dict[str, Any] = {
    "one": {"share": 0.5, "name": PARITY},
    "two": {"share": 0.3, "name": PARITY, "task_pool": 6},
    "three": {"share": 0.2, "options": {"hops": [1, 1]}},
}


def config_of(folder: Path, model: Path, *, iterations: int, **sections: Any) -> RunConfig:
    config = small_config(folder, model, **{"run": {"iterations": iterations}, **sections})
    values = config.model_dump(mode="json")
    values |= {"environment": {}, "environments": THREE}
    return RunConfig.model_validate(values)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> TrainResult:
    """Five iterations, stopped and resumed in between."""
    config = config_of(tmp_path_factory.mktemp("several"), qwen2, iterations=5)
    train(config, display=StopAfter(2))
    return train(config, resume=True, display=SilentDisplay())


def episodes(run: TrainResult) -> dict[str, int]:
    query = "select environment, count(*) from trajectories where state != 'orphaned' group by 1"
    return dict(rows(run.folder / "replay.sqlite", query))


def test_shares_are_exact_also_after_a_resume(finished: TrainResult) -> None:
    # 16 fresh episodes, and 12 in each of four iterations more, are 64: 32, 19.2 and 12.8, in whole groups of four.
    assert episodes(finished) == {"one": 32, "two": 20, "three": 12}


def test_groups_are_whole_in_one_environment(finished: TrainResult) -> None:
    query = "select count(distinct environment), count(*) from trajectories group by group_id"
    found = rows(finished.folder / "replay.sqlite", query)
    assert {environments for environments, _ in found} == {1}
    assert {size for _, size in found} == {4}


def test_each_environment_has_its_own_figures(finished: TrainResult) -> None:
    query = "select distinct name from metrics where name like 'environment/%' order by 1"
    names = {name for (name,) in rows(finished.folder / "replay.sqlite", query)}
    figures = ("episodes", "reward", "success", "held_out_reward", "held_out_success")
    assert names == {f"environment/{name}/{figure}" for name in THREE for figure in figures}
    page = (finished.folder / "report.html").read_text()
    assert "Held-out success, by environment" in page
    assert "One by one" in page


def test_evaluation_tells_each_environment_apart(finished: TrainResult) -> None:
    report = evaluate_run(finished.folder, tasks=6)
    assert list(report.environments) == ["one", "two", "three"]
    assert "pass@1 in two" in as_table(report)
    assert report.evaluated.environment == "one, two, three"


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_shares_of_three_environments_are_exact_over_fifty_iterations_and_a_resume(tmp_path: Path, qwen2: Path) -> None:
    sections = {"evaluation": {"every": 0, "tasks": 4}, "checkpoint": {"every": 7}, "replay": {"fraction": 0.0}}
    config = config_of(tmp_path, qwen2, iterations=50, **sections)
    train(config, display=StopAfter(23))
    run = train(config, resume=True, display=SilentDisplay())
    # Fifty iterations of 16 episodes are 800: 400, 240 and 160, all of them whole groups of four.
    assert episodes(run) == {"one": 400, "two": 240, "three": 160}
