"""A trained policy as a folder that plain transformers loads, or on a hub: weights, tokenizer, template, model card."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from agentloop.analysis.model_card import model_card
from agentloop.analysis.stored_policies import stored_weights
from agentloop.errors import UserError, one_line
from agentloop.models.loading import load_model, muted_libraries
from agentloop.runs.run_folder import COMPLETE, RunFolder, explained, open_run_folder
from replay.store import ReplayStore

_HUB = "hf:"
_ADAPTER = "adapter_config.json"


def export_run(run: Path, target: str, *, policy: int | None = None, private: bool = False) -> str:
    """Write a policy of a run to a folder, or to a hub with `hf:ID`; returns the folder's path or the hub's address.

    Adapters are merged into the model below them. Raises UserError where the run has no weights, the folder is not
    empty, or the hub refuses, and for what `sft` made, which is a whole model already.
    """
    folder = open_run_folder(run)
    if not folder.environments:
        raise UserError(
            f"RUN must be a run of agentloop train, got {str(run)!r}. What sft made can be copied as it is."
        )
    weights = stored_weights(folder, policy)
    if not target.startswith(_HUB):
        return str(_export(folder, weights, Path(target)))
    with tempfile.TemporaryDirectory() as place:
        return _upload(_export(folder, weights, Path(place) / "model"), target.removeprefix(_HUB), private=private)


def _export(folder: RunFolder, weights: Path, target: Path) -> Path:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--to must be a new or an empty folder, got {str(target)!r}. Choose another, or empty it.")
    with explained(target, option="--to", advice="Choose another folder."):
        left = shutil.ignore_patterns(COMPLETE)  # and modes: what is given away is not private, as a run's weights are
        shutil.copytree(weights, target, ignore=left, dirs_exist_ok=True, copy_function=shutil.copyfile)
        if (target / _ADAPTER).exists():
            _merge(folder, target)
        (target / "README.md").write_text(_card(folder, weights), encoding="utf-8")
    return target


def _merge(folder: RunFolder, target: Path) -> None:
    """Adapters in `target` become weights of the model below them."""
    from peft import PeftModel

    config = folder.config
    named = json.loads((target / _ADAPTER).read_text())["base_model_name_or_path"]
    below = load_model(config.model, (config.model.path or folder.start) if config.lora.rank else named)
    adapted: Any = below.model
    with muted_libraries():
        merged = PeftModel.from_pretrained(adapted, str(target)).merge_and_unload()
        for file in target.glob("adapter_*"):
            file.unlink()
        merged.save_pretrained(target)


def _card(folder: RunFolder, weights: Path) -> str:
    store = ReplayStore.open(folder.database, read_only=True)
    try:
        return model_card(store, folder, weights)
    finally:
        store.close()


def _upload(model: Path, repository: str, *, private: bool) -> str:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise UserError("--to must be a folder while HF_HUB_OFFLINE is set, got a hub's name. Unset it.")
    api = HfApi()
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=model, commit_message="agentloop export")
    except Exception as error:  # the hub's own errors, and those of whatever lies between
        raise UserError(
            f"--to must name a repository that you may write to, got {_HUB}{repository} with {one_line(error)}. "
            "Log in (hf auth login), or correct the name."
        ) from error
    return str(address)
