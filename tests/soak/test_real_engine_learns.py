"""The quickstart learns through a real vLLM, with all weights and with adapters by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.runs import rows
from tests.soak.test_quickstart import evaluations, quickstart, warmed_up_model
from tests.vllm.environment import missing
from tests.vllm.server import KEY, real_engine

pytestmark = [pytest.mark.soak, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmed_up_model(tmp_path_factory.mktemp("warm-up"))


@pytest.mark.parametrize(("rank", "learning_rate"), [(0, 1.5e-3), (16, 5e-3)], ids=["weights", "adapters"])
def test_quickstart_learns_through_vllm(
    rank: int, learning_rate: float, warmed_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    with real_engine(warmed_up, tmp_path, lora_rank=rank) as engine:
        result = quickstart(
            *(tmp_path, f"model.path={warmed_up}", "rollout.engine=vllm", f'engine.urls=["{engine.url}"]'),
            *("engine.served_model_name=tiny", "engine.api_key_env=ENGINE_KEY", "context.max_tokens=1024"),
            *(f"lora.rank={rank}", f"optimizer.learning_rate={learning_rate}", "run.stop_at_success=0.95"),
        )
    run = Path(str(result["folder"]))
    success, drift = evaluations(run), drifts(run)
    shown = ", ".join(f"{share:.1%}" for share in success)
    print(f"rank {rank}: {shown} in {result['iterations']} iterations; drift at most {max(drift):.6f}")
    assert max(success) >= 0.95
    assert len(drift) == result["iterations"]
    assert max(drift) <= 1.001


def drifts(run: Path) -> list[float]:
    """The largest of a fresh token, of each iteration."""
    query = "select value from metrics where name = 'actor/fresh/drift_max' order by iteration"
    return [value for (value,) in rows(run / "replay.sqlite", query)]
