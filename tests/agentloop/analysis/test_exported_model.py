"""A policy leaves its run: what plain transformers loads is what was trained."""

import json
import os
import re
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

from agentloop.analysis.exported_model import export_run
from agentloop.cli.main import app
from agentloop.errors import UserError
from agentloop.models.adapters import load_policy
from agentloop.runs.display import with_interval
from agentloop.runs.run_folder import open_run_folder
from agentloop.supervised.sft import sft
from agentloop.training.train import train
from replay.store import ReplayStore
from tests.agentloop.conftest import Finished
from tests.fakes.runs import SilentDisplay, small_config
from tests.fakes.runs import rows as sqlite

pytestmark = pytest.mark.slow
IDS = torch.arange(3, 19).reshape(2, 8)


@pytest.fixture
def run(finished: Finished) -> Path:
    return finished[0].folder


@torch.no_grad()
def logits(model: PreTrainedModel | Path) -> torch.Tensor:
    loaded = AutoModelForCausalLM.from_pretrained(model) if isinstance(model, Path) else model
    found: torch.Tensor = loaded(IDS).logits
    return found


def trained(run: Path) -> PreTrainedModel:
    config = open_run_folder(run).config
    assert config.model.path is not None
    return load_policy(config, config.model.path, saved=run / "checkpoints" / "000003" / "model").model


def test_exported_weights_are_the_last_checkpoints_or_of_the_version(run: Path, tmp_path: Path, qwen2: Path) -> None:
    mine, first = export_run(run, tmp_path / "mine"), export_run(run, tmp_path / "first", policy=0)
    mask = os.umask(0)
    os.umask(mask)
    assert (mine / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask
    assert torch.equal(logits(mine), logits(trained(run)))
    assert torch.equal(logits(first), logits(qwen2))
    assert AutoTokenizer.from_pretrained(mine).chat_template


def test_adapters_are_merged_into_the_model_below_them(tmp_path: Path, qwen2: Path) -> None:
    config = small_config(tmp_path / "runs", qwen2, lora={"rank": 4}, optimizer={"learning_rate": 0.05})
    run = train(config, display=SilentDisplay()).folder
    merged = export_run(run, tmp_path / "merged")
    assert not list(merged.glob("adapter*"))
    assert torch.allclose(logits(merged), logits(trained(run)), atol=1e-5)
    assert (logits(merged) - logits(qwen2)).abs().max() > 1e-3  # it was trained


def test_the_card_has_success_rows_and_where_it_comes_from(run: Path, tmp_path: Path) -> None:
    mine, second, first = (
        (export_run(run, tmp_path / str(policy), policy=policy) / "README.md").read_text() for policy in (None, 1, 0)
    )
    with closing(ReplayStore.open(run / "replay.sqlite", read_only=True)) as store:
        id = store.run().id
    # Evaluations were made after iterations 0, 2 and 3.
    evaluated = dict(sqlite(run / "replay.sqlite", "select iteration, value from metrics where name = 'eval/success'"))
    before, after = (with_interval(evaluated[iteration], 8) for iteration in (0, 3))
    assert f"| held-out success | {after} |\n| held-out success before training | {before} |" in mine
    assert "| held-out success | not measured for this policy |" in second
    assert "| rows that fed updates | 16 fresh, 0 replayed |" in second
    assert f"| held-out success | {before} |\n| iterations | 0 |" in first and "before training" not in first
    rows = "| rows that fed updates | 40 fresh, 8 replayed |"  # 16, then twice 12 + 4, a quarter of 16
    for part in (rows, f"`{id}`", "batch.group_size: 4"):
        assert part in mine
    assert str(run.parent) not in mine
    # A folder is named with the one around it.
    assert re.search(r"\| model it began with \| [^/| ]+/qwen2 \|", mine)


def test_a_folder_with_something_in_it_and_what_sft_made_are_refused(run: Path, tmp_path: Path, qwen2: Path) -> None:
    rows = [[{"role": "user", "content": str(i)}, {"role": "assistant", "content": "0"}] for i in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    refused = CliRunner().invoke(app, ["export", str(run), "--to", str(tmp_path)])
    assert str(refused.exception).startswith("--to must be a new or an empty folder, got")
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
    config = small_config(tmp_path / "runs", qwen2, sft={"data": str(tmp_path / "data.jsonl")})
    with pytest.raises(UserError, match="RUN must be a run of agentloop train"):
        export_run(sft(config, display=SilentDisplay()).folder, tmp_path / "out")
