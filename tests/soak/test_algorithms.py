"""Algorithms without a critic learn the quickstart's task, from the same warmed-up model, through the front door."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.test_quickstart import evaluations, quickstart, warmed_up_model

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmed_up_model(tmp_path_factory.mktemp("warm-up"))


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce++", "dr_grpo", "opo"])
def test_algorithm_raises_held_out_success_by_sixty_points(algorithm: str, warmed_up: Path, tmp_path: Path) -> None:
    result = quickstart(
        tmp_path, f"algorithm={algorithm}", f"model.path={warmed_up}", "run.iterations=40", "run.stop_at_success=0.8"
    )
    success = evaluations(Path(str(result["folder"])))
    print(f"{algorithm}: {', '.join(f'{share:.1%}' for share in success)}, every 4 iterations")
    assert success[-1] - success[0] >= 0.60
