"""Exports a trained policy as a folder that plain transformers loads: weights, tokenizer and chat template."""

import json
import shutil
from pathlib import Path
from typing import Any

from agentloop.analysis.stored_policies import first_weights, named_policy
from agentloop.errors import UserError
from agentloop.models.loading import load_model, muted_libraries
from agentloop.runs.run_folder import COMPLETE, RunFolder, explaining_disk

_ADAPTER = "adapter_config.json"


def export_run(run: Path, target: Path | str, *, policy: int | str | None = None) -> Path:
    """Write a policy of a run to the folder `target`; adapters are merged into their model.

    `run` and `policy` are as for `named_policy`. Raises UserError if the run has no weights or the folder is not empty,
    and for trainings by `sft`, whose model is a whole folder already.
    """
    (folder, _, weights), target = named_policy(run, policy), Path(target)
    if not folder.environments:
        raise UserError(f"RUN must be a run of agentloop train, got {str(run)!r}. Copy sft's folder model as it is.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--to must be a new or an empty folder, got {str(target)!r}. Choose another, or empty it.")
    with explaining_disk(target, option="--to", advice="Choose another folder."):
        left = shutil.ignore_patterns(COMPLETE)  # copyfile leaves the private modes of a run's files out
        shutil.copytree(weights, target, ignore=left, dirs_exist_ok=True, copy_function=shutil.copyfile)
        if (target / _ADAPTER).exists():
            _merge(folder, target)
    return target


def _merge(folder: RunFolder, target: Path) -> None:
    """Merge the adapters in `target` into the weights of the model below them."""
    from peft import PeftModel

    config = folder.config
    named = json.loads((target / _ADAPTER).read_text())["base_model_name_or_path"]
    below = load_model(config.model, first_weights(folder) if config.lora.rank else named)
    adapted: Any = below.model
    with muted_libraries():
        merged = PeftModel.from_pretrained(adapted, str(target)).merge_and_unload()
        for file in target.glob("adapter_*"):
            file.unlink()
        merged.save_pretrained(target)
