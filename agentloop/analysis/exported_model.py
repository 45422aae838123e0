"""Exports a trained policy as a folder that plain transformers loads: weights, tokenizer, template and model card."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from agentloop.analysis.stored_policies import first_weights, named_policy
from agentloop.config import RunConfig
from agentloop.config.describe import changed_keys
from agentloop.errors import UserError, explaining_disk
from agentloop.models.loading import load_model, muted_libraries
from agentloop.runs.display import with_interval
from agentloop.runs.run_folder import COMPLETE, RunFolder
from replay import questions
from replay.questions.runs import finite
from replay.store import ReplayStore

_ADAPTER = "adapter_config.json"
_METRICS = ("eval/success", "eval/tasks", "batch/fresh", "batch/replay")
_PLACES = ("run.folder", "model.path", "replay.database")
"""Keys that name places on the machine, which the model card leaves out."""
_CARD = """---
library_name: transformers
pipeline_tag: text-generation
{base}tags: [agentloop, reinforcement-learning, experience-replay, tool-use]
---
# {name}

Trained with `agentloop-replay` {version}: a causal language model that calls tools over several turns, trained by
reinforcement learning with experience replay.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(PATH)  # this folder, or its name on the hub
tokenizer = AutoTokenizer.from_pretrained(PATH)  # with the chat template it was trained with
prompt = tokenizer.apply_chat_template(
    MESSAGES, tools=TOOLS, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
reply = model.generate(**prompt, max_new_tokens=128)
```

It knows the messages and tools of its environment: `agentloop env check CONFIG --json` prints both.

| | |
|---|---|
{figures}

## Configuration

What differs from the defaults:

```yaml
{settings}
```
"""


def export_run(run: Path, target: Path | str, *, policy: int | str | None = None) -> Path:
    """Write a policy of a run to the folder `target`; adapters are merged into their model.

    `run` and `policy` are as for `named_policy`. Raises UserError if the run has no weights or the folder is not empty,
    and for trainings by `sft`, whose model is a whole folder already.
    """
    (folder, version, weights), target = named_policy(run, policy), Path(target)
    if not folder.environments:
        raise UserError(f"RUN must be a run of agentloop train, got {str(run)!r}. Copy sft's folder model as it is.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--to must be a new or an empty folder, got {str(target)!r}. Choose another, or empty it.")
    with explaining_disk(target, option="--to", advice="Choose another folder."):
        left = shutil.ignore_patterns(COMPLETE)  # copyfile leaves the private modes of a run's files out
        shutil.copytree(weights, target, ignore=left, dirs_exist_ok=True, copy_function=shutil.copyfile)
        if (target / _ADAPTER).exists():
            _merge(folder, target)
        with closing(ReplayStore.open(folder.database, read_only=True)) as store:
            (target / "README.md").write_text(_card(store, folder, version), encoding="utf-8")
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


def _card(store: ReplayStore, folder: RunFolder, made: int) -> str:
    """The model card as Markdown, after the fields that hubs read."""
    config, base = folder.config, folder.config.model.path
    changed = changed_keys(config)
    settings = [f"{key}: {json.dumps(value)}" for key, value in changed.items() if key not in _PLACES]
    return _CARD.format(
        base="" if base is None or Path(base).exists() else f"base_model: {json.dumps(base)}\n",
        name=folder.path.name,
        version=store.run(folder.run_id).code_version,
        figures="\n".join(f"| {name} | {value} |" for name, value in _figures(store, folder, made)),
        settings="\n".join(settings),
    )


def _figures(store: ReplayStore, folder: RunFolder, made: int) -> Iterator[tuple[str, object]]:
    series = questions.metric_series(store, folder.run_id, names=_METRICS, within=range(made + 1))
    success, tasks, *rows = (dict(finite(series, name)) for name in _METRICS)
    measured = {at: with_interval(share, round(tasks[at])) for at, share in success.items()}
    yield "held-out success", measured.get(made, "not measured for this policy")
    if made and 0 in measured:
        yield "held-out success before training", measured[0]
    yield "iterations", made
    fresh, replayed = (sum(each.values()) for each in rows)
    yield "rows that fed updates", f"{fresh:,.0f} fresh, {replayed:,.0f} replayed"
    yield "environment", folder.config.environment.name
    yield "model it began with", _first_model(folder.config)
    yield "run", f"`{folder.run_id}`"
    hashes = store.run(folder.run_id).fingerprint or {}
    for name in ("tokenizer", "template"):
        if name in hashes:
            yield f"{name} hash", f"`{hashes[name]}`"


def _first_model(config: RunConfig) -> str:
    """A hub model's id, or the last two names of a folder, because `sft` calls all its folders `model`."""
    model = config.model.path
    if model is None:
        return "the built-in one"
    return "/".join(Path(model).resolve().parts[-2:]) if Path(model).exists() else model
