"""Every algorithm and context strategy learns, through the front door."""

from pathlib import Path

import pytest

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
