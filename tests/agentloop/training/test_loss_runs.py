"""Objectives and corrections in whole runs."""

from pathlib import Path
from typing import Any

from agentloop.training.train import train
from tests.fakes.runs import SilentDisplay, rows, small_config


def test_run_with_other_objectives_and_a_correction_tells_what_they_did(tmp_path: Path, qwen2: Path) -> None:
    correction = {"kind": "truncate", "level": "turn", "mean": "geometric", "ratio_high": 1.5}
    loss: dict[str, Any] = {
        "fresh": {"objective": "gspo"},
        "replay": {"objective": "gmpo", "anchor": "old", "correction": correction, "missing_log_probs": "luffy"},
    }
    run = {"name": "other", "folder": str(tmp_path), "iterations": 2, "seed": 0}
    config = small_config(tmp_path, qwen2, run=run, loss=loss, batch={"ppo_epochs": 2})
    found = train(config, display=SilentDisplay()).folder / "replay.sqlite"
    names = {name for (name,) in rows(found, "select name from metrics where iteration = 2")}
    assert {"actor/fresh/pg_loss", "actor/replay/pg_loss", "actor/replay/importance_weight_mean"} <= names
    assert "actor/fresh/importance_weight_mean" not in names
    ((weight,),) = rows(
        found, "select value from metrics where iteration = 2 and name = 'actor/replay/importance_weight_mean'"
    )
    assert 0 < weight <= 1.5
