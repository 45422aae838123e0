"""A policy leaves its run: what plain transformers loads is what was trained, also from a hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

from agentloop.analysis.exported_model import export_run
from agentloop.analysis.stored_policies import evaluate_run
from agentloop.cli.main import app
from agentloop.errors import UserError
from agentloop.models.adapters import load_policy
from agentloop.rollouts.intervals import wilson
from agentloop.runs.run_folder import open_run_folder
from agentloop.supervised.sft import sft
from agentloop.training.train import train
from replay.store import ReplayStore
from tests.docs.blocks import ROOT
from tests.fakes.hub_server import HubServer, hub_server
from tests.fakes.runs import SilentDisplay, save_qwen2, small_config

IDS = torch.arange(3, 19).reshape(2, 8)
ADAPTED = {"lora": {"rank": 4}, "optimizer": {"learning_rate": 0.05}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("models") / "mine")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return train(small_config(tmp_path_factory.mktemp("runs"), model), display=SilentDisplay()).folder


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits
    return found


def trained(run: Path) -> PreTrainedModel:
    config = open_run_folder(run).config
    assert config.model.path is not None
    return load_policy(config, config.model.path, saved=run / "checkpoints" / "000003" / "model").model


def test_exported_weights_are_those_of_the_last_checkpoint(run: Path, tmp_path: Path) -> None:
    export_run(run, str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~_umask()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    assert torch.equal(logits(exported), logits(trained(run)))
    assert AutoTokenizer.from_pretrained(tmp_path / "mine").chat_template


def test_an_earlier_policy_is_exported_by_its_version(run: Path, tmp_path: Path) -> None:
    export_run(run, str(tmp_path / "first"), policy=0)
    first = AutoModelForCausalLM.from_pretrained(open_run_folder(run).config.model.path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "first")), logits(first))


def test_adapters_are_merged_into_the_model_below_them(tmp_path: Path, model: Path) -> None:
    run = train(small_config(tmp_path / "runs", model, **ADAPTED), display=SilentDisplay()).folder
    export_run(run, str(tmp_path / "merged"))
    assert not list((tmp_path / "merged").glob("adapter*"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert torch.allclose(merged, logits(trained(run)), atol=1e-5)
    base = logits(AutoModelForCausalLM.from_pretrained(model))
    assert (merged - base).abs().max() > 1e-3  # it was trained


def test_the_exported_folder_has_the_run_s_own_success(run: Path, tmp_path: Path) -> None:
    """Trained for no iteration at all: the same episodes are sampled."""
    exported = export_run(run, str(tmp_path / "mine"))
    folder = open_run_folder(run)
    config = folder.config.model_copy(update={"model": folder.config.model.model_copy(update={"path": exported})})
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(tmp_path), "iterations": 1})})
    again = train(config, display=SilentDisplay())
    assert again.success_before == evaluate_run(run).evaluation.success


def test_the_card_tells_success_rows_and_where_it_comes_from(run: Path, tmp_path: Path) -> None:
    export_run(run, str(tmp_path / "mine"))
    card = (tmp_path / "mine" / "README.md").read_text()
    with closing(ReplayStore.open(run / "replay.sqlite", read_only=True)) as store:
        id = store.run().id
    assert "held-out success, last" in card
    assert "of 8 tasks, iteration 3" in card
    assert "| rows that fed updates | 40 fresh, 8 replayed |" in card  # 16, then twice 12 + 4, a quarter of 16
    assert f"`{id}`" in card
    assert "batch.group_size: 4" in card
    assert str(run.parent) not in card
    # save_qwen2 wrote it to .../mine: a folder is named with the one around it.
    assert re.search(r"\| model it began with \| [^/| ]+/mine \|", card)


def test_the_card_counts_the_tasks_there_were_and_not_their_samples(model: Path, tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "runs",
        model,
        run={"iterations": 1},
        environment={"name": f"{ROOT / 'examples' / 'word_problems.py'}:WordProblems"},
        tasks={"data": str(ROOT / "examples" / "word_problems.jsonl")},
        evaluation={"tasks": 1000, "samples": 2},
    )
    run = train(config, display=SilentDisplay()).folder
    tasks = evaluate_run(run).evaluation.tasks
    assert tasks < 50
    export_run(run, str(tmp_path / "mine"))
    around = wilson(0, tasks)
    told = f"0.0% (95 %: 0.0% to {around.high:.1%}) of {tasks} tasks, iteration 1 |"
    assert told in (tmp_path / "mine" / "README.md").read_text()


def test_a_folder_with_something_in_it_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    told = CliRunner().invoke(app, ["export", str(run), "--to", str(tmp_path)])
    assert isinstance(told.exception, UserError)
    assert str(told.exception).startswith("--to must be a new or an empty folder, got")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_sft_made_is_refused(tmp_path: Path, model: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [[{"role": "user", "content": str(i)}, {"role": "assistant", "content": "0"}] for i in range(4)]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    config = small_config(tmp_path / "runs", model, sft={"data": str(data)})
    made = sft(config, display=SilentDisplay())
    with pytest.raises(UserError, match="RUN must be a run of agentloop train"):
        export_run(made.folder, str(tmp_path / "out"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub that this process uploads to; the client read its settings when it was imported."""
    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        yield server


_DOWNLOADED = """
import sys, torch
from agentloop.config import ModelSection
from agentloop.models.loading import load_model
loaded = load_model(ModelSection(path="me/agent"), "me/agent")
torch.save(loaded.model(torch.arange(3, 19).reshape(2, 8)).logits.detach(), sys.argv[1])
"""


def test_a_policy_goes_to_a_hub_and_comes_back(run: Path, hub: HubServer, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["export", str(run), "--to", "hf:me/agent", "--private"])
    assert (told.exit_code, f"exported to {hub.url}/me/agent" in told.stdout) == (0, True)
    assert hub.private == {"me/agent"}
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= hub.repositories["me/agent"].keys()
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", _DOWNLOADED, str(tmp_path / "logits")]
    came = subprocess.run(command, env={**os.environ, **settings}, check=False, capture_output=True, text=True)
    assert came.returncode == 0, came.stderr
    assert torch.equal(torch.load(tmp_path / "logits"), logits(trained(run)))


def test_a_hub_that_refuses_is_one_line(run: Path, hub: HubServer) -> None:
    hub.refuses = True
    with pytest.raises(UserError, match="may write to, got hf:me/nothing with .*rights to create a model"):
        export_run(run, "hf:me/nothing")


def test_a_hub_is_refused_offline(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="--to must be a folder while HF_HUB_OFFLINE is set"):
        export_run(run, "hf:me/agent")
