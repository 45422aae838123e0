"""A policy is written down for engines: weights they can reload, or an adapter, with the learner's word on a probe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

from agentloop.engines.publish.published_policy import RECORD, Probe, PublishedPolicy, folder_hash, read_published
from agentloop.models.policy_weights import PolicyWeights
from agentloop.runs.checkpoint import write_directory

_INDEX = "model.safetensors.index.json"
_WHOLE, _BODY, _HEAD = "model.safetensors", "model-body.safetensors", "model-head.safetensors"


def write_published(
    target: Path,
    weights: PolicyWeights,
    save_model: Callable[[Path], None],
    *,
    probe: Probe,
    run: str,
    version: int,
) -> PublishedPolicy:
    """Make `target` a published policy, whole or not at all; `save_model` writes weights and tokenizer into it."""

    def fill(folder: Path) -> None:
        save_model(folder)
        if weights.kind == "full":
            untie(folder, weights)
        digest = folder_hash(folder)
        policy = PublishedPolicy(run=run, version=version, kind=weights.kind, sha256=digest, probe=probe)
        (folder / RECORD).write_text(policy.model_dump_json())

    write_directory(target, fill)
    return read_published(target)


def untie(folder: Path, weights: PolicyWeights) -> None:
    """Where the head is tied to the embeddings, the folder gets one of its own.

    An engine on a CPU packs a tied head when it starts, and a folder without a head leaves it as it was.
    """
    name = weights.tied_head
    if name is None:
        return
    if (folder / _INDEX).exists():
        index = json.loads((folder / _INDEX).read_text())
    else:
        # Under its old name the one file would be read alone.
        (folder / _WHOLE).rename(folder / _BODY)
        with safe_open(folder / _BODY, framework="pt") as body:
            index = {"metadata": {}, "weight_map": dict.fromkeys(body.keys(), _BODY)}
    weights.save_head(folder / _HEAD, name)
    index["weight_map"][name] = _HEAD
    (folder / _INDEX).write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = False
    if "tie_word_embeddings" in config.get("text_config", {}):
        config["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2))
