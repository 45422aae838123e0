"""A policy is written down for engines: weights they can reload, or an adapter, with the learner's word on a probe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from agentloop.generation.publishing.published_policy import RECORD, Probe, PublishedPolicy, folder_hash
from agentloop.models.policy_weights import PolicyWeights
from agentloop.runs.checkpoint import write_directory

_TEXTS = (
    "The capital of France is",
    "2 + 2 = 4, and 17 * 23 =",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return",
    '{"name": "search", "arguments": {"query": "weather in',
    "Naïve “quotes”, 東京, 🙂 and  two spaces:",
    "Question: which of the two is heavier?\nAnswer:",
    "<b>Once</b> upon a time there was a",
    "1. Open the file.\n2. Read a line.\n3.",
)
_LIKELIEST = 40
"""More than an engine gives, so that what it gives is among them."""
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
    half_precision: bool | None = None,
) -> PublishedPolicy:
    """Make `target` a published policy, whole or not at all; `save_model` writes weights and tokenizer into a folder.

    `half_precision`: the engine computes in 16 bits though the weights have 32. None: it computes as they are stored.
    """
    kind = weights.kind
    written: list[PublishedPolicy] = []

    def fill(folder: Path) -> None:
        save_model(folder)
        if kind == "full":
            untie(folder, weights)
        policy = PublishedPolicy(
            run=run,
            version=version,
            kind=kind,
            sha256=folder_hash(folder),
            half_precision=weights.model.dtype != torch.float32 if half_precision is None else half_precision,
            probe=probe,
        )
        (folder / RECORD).write_text(policy.model_dump_json())
        written.append(policy)

    write_directory(target, fill)
    return written[0]


def make_probe(weights: PolicyWeights, tokenizer: PreTrainedTokenizerBase, *, temperature: float) -> Probe:
    """The learner's log-probs of the likeliest tokens after a few texts.

    They are texts, not ids by chance: tokens that no text holds have embeddings that amplify any rounding.
    """
    text = "\n".join(_TEXTS)
    prompts = [_encoded(tokenizer, part) for part in _TEXTS]
    found = weights.next_tokens(prompts, temperature=temperature, most=_LIKELIEST)
    return Probe(
        temperature=temperature,
        prompts=tuple(prompts),
        next_ids=tuple(token.ids for token in found),
        next_log_probs=tuple(token.log_probs for token in found),
        text=text,
        text_ids=_encoded(tokenizer, text),
    )


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


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
    for part in (config, config.get("text_config", {})):
        if "tie_word_embeddings" in part or part is config:
            part["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2))
