"""What algorithms declare, and what is made of it."""

from pathlib import Path

import pytest

from agentloop.config.config_file import load_config
from agentloop.training.train import train
from docs.algorithm_tables import PAGE, with_tables
from tests.fakes.runs import ROOT, SilentDisplay, rows, small_config


def test_tables_of_the_page_are_what_algorithms_declare() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "python -m docs.algorithm_tables"


def test_example_of_an_own_algorithm_trains(tmp_path: Path, qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/add-an-algorithm.md has it: rewards of 0 and 1 are on one side of their median, or at it."""
    (tmp_path / "own.yaml").write_text(
        (ROOT / "docs" / "add-an-algorithm.md").read_text().split("```yaml\n")[1].split("```")[0]
    )
    monkeypatch.chdir(ROOT)
    own = load_config(tmp_path / "own.yaml")
    config = small_config(
        tmp_path,
        qwen2,
        run={"iterations": 1},
        advantage={"function": own.advantage.function},
        loss={"fresh": {"objective": own.loss.fresh.objective.model_dump()}},
    )
    display = SilentDisplay()
    result = train(config, display=display)
    found = rows(result.folder / "replay.sqlite", "select distinct advantage from trajectories order by 1")
    assert found in ([(-1.0,), (0.0,)], [(0.0,), (1.0,)], [(-1.0,), (0.0,), (1.0,)])
    assert display.iterations[0]["actor/grad_norm"] > 0
