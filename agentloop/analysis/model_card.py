"""The README of an exported policy: how it was trained, how well it does, and where it comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from agentloop.config import RunConfig
from agentloop.config.describe import changed_keys
from agentloop.rollouts.intervals import wilson
from agentloop.runs.run_folder import RunFolder
from replay import questions
from replay.store import ReplayStore

_SUCCESS = "eval/success"
_OF_THE_MACHINE = ("run.folder", "model.path", "replay.database")
"""Keys that say where things lay, not what was done."""
_PAGE = """{front}
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

It knows the messages and tools of its environment: `agentloop env check --json` prints both.

{figures}

## Configuration

What differs from the defaults:

```yaml
{settings}
```
"""


def model_card(store: ReplayStore, folder: RunFolder, weights: Path) -> str:
    """Markdown, with the fields that hubs read before it."""
    changed = changed_keys(folder.config)
    settings = [f"{key}: {json.dumps(value)}" for key, value in changed.items() if key not in _OF_THE_MACHINE]
    return _PAGE.format(
        front="\n".join(_front_matter(folder.config)),
        name=folder.path.name,
        version=store.run(folder.run_id).code_version,
        figures="\n".join(
            ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in _figures(store, folder, weights))]
        ),
        settings="\n".join(settings),
    )


def _front_matter(config: RunConfig) -> list[str]:
    base = config.model.path
    named = [] if base is None or Path(base).exists() else [f"base_model: {json.dumps(base)}"]
    tags = ["tags: [agentloop, reinforcement-learning, experience-replay, tool-use]"]
    return ["---", "library_name: transformers", "pipeline_tag: text-generation", *named, *tags, "---"]


def _figures(store: ReplayStore, folder: RunFolder, weights: Path) -> list[tuple[str, str]]:
    config, record = folder.config, store.run(folder.run_id)
    evaluated = questions.metric_series(store, folder.run_id, names=[_SUCCESS]).get(_SUCCESS, [])
    draws = questions.summary(store, folder.run_id)["draws"]
    hashes = record.fingerprint or {}
    return [
        *_held_out(evaluated, _tasks(store, folder)),
        (
            "iterations",
            str(weights.name if weights.parent == folder.policies else weights.parent.name).lstrip("0") or "0",
        ),
        ("rows that fed updates", f"{draws['fresh']:,} fresh, {draws['replay']:,} replayed"),
        ("environment", config.environment.name),
        ("model it began with", _named(config.model.path)),
        ("run", f"`{folder.run_id}`"),
        *((f"{name} hash", f"`{hashes[name]}`") for name in ("tokenizer", "template") if name in hashes),
    ]


def _named(model: str | None) -> str:
    """A hub's model by its id; of a folder its last two names, as what `sft` writes is called `model`."""
    if model is None:
        return "the built-in one"
    return "/".join(Path(model).resolve().parts[-2:]) if Path(model).exists() else model


def _tasks(store: ReplayStore, folder: RunFolder) -> int:
    """How many an evaluation has: fewer than configured where data holds out fewer rows."""
    section, kept = folder.config.evaluation, questions.held_out(store, folder.run_id, limit=1)["evaluations"]
    return math.ceil(kept[-1]["episodes"] / section.samples) if kept else section.tasks


def _held_out(evaluated: Sequence[tuple[int, float]], tasks: int) -> list[tuple[str, str]]:
    """The first and the last evaluation, with Wilson's interval over the tasks: a wide one where each has samples."""
    names = {0: "held-out success, first", -1: "held-out success, last"}
    found = []
    for place, name in names.items() if evaluated else ():
        iteration, success = evaluated[place]
        around = wilson(success * tasks, tasks)
        found.append(
            (
                name,
                f"{success:.1%} (95 %: {around.low:.1%} to {around.high:.1%}) of {tasks} tasks, iteration {iteration}",
            )
        )
    return found
