"""A policy is written down for engines: weights they can reload, or an adapter, with the learner's word on a probe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agentloop.generation.publishing.published_policy import RECORD, Probe, PublishedPolicy, folder_hash
from agentloop.models.loading import LoadedModel, has_adapters
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
    loaded: LoadedModel,
    save_model: Callable[[Path], None],
    *,
    run: str,
    version: int,
    temperature: float,
    half_precision: bool | None = None,
) -> PublishedPolicy:
    """Make `target` a published policy, whole or not at all; `save_model` writes weights and tokenizer into a folder.

    `half_precision`: the engine computes in 16 bits though the weights have 32. None: it computes as they are stored.
    """
    model: Any = loaded.model
    probe = make_probe(loaded, temperature=temperature)
    kind = "lora" if has_adapters(model) else "full"
    written: list[PublishedPolicy] = []

    def fill(folder: Path) -> None:
        save_model(folder)
        if kind == "full":
            untie(folder, model)
        policy = PublishedPolicy(
            run=run,
            version=version,
            kind=kind,
            sha256=folder_hash(folder),
            half_precision=model.dtype != torch.float32 if half_precision is None else half_precision,
            probe=probe,
        )
        (folder / RECORD).write_text(policy.model_dump_json())
        written.append(policy)

    write_directory(target, fill)
    return written[0]


def make_probe(loaded: LoadedModel, *, temperature: float) -> Probe:
    """The learner's log-probs of the likeliest tokens after a few texts.

    They are texts, not ids by chance: tokens that no text holds have embeddings that amplify any rounding.
    """
    model: Any = loaded.model
    text = "\n".join(_TEXTS)
    prompts, text_ids = [_encoded(loaded, part) for part in _TEXTS], _encoded(loaded, text)
    next_ids, next_log_probs = [], []
    for prompt in prompts:
        with torch.no_grad():
            logits = model(torch.tensor([prompt], device=model.device)).logits[0, -1].float()
        likeliest = torch.log_softmax(logits / temperature, dim=-1).topk(min(_LIKELIEST, len(logits)))
        next_ids.append(tuple(likeliest.indices.tolist()))
        next_log_probs.append(tuple(likeliest.values.tolist()))
    return Probe(
        temperature=temperature,
        prompts=tuple(prompts),
        next_ids=tuple(next_ids),
        next_log_probs=tuple(next_log_probs),
        text=text,
        text_ids=text_ids,
    )


def _encoded(loaded: LoadedModel, text: str) -> tuple[int, ...]:
    return tuple(loaded.tokenizer.encode(text, add_special_tokens=False))


def untie(folder: Path, model: Any) -> None:
    """Where the head is tied to the embeddings, the folder gets one of its own.

    An engine on a CPU packs a tied head when it starts, and a folder without a head leaves it as it was.
    """
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        return
    name = next(path for path, module in model.named_modules() if module is head) + ".weight"
    if (folder / _INDEX).exists():
        index = json.loads((folder / _INDEX).read_text())
    else:
        # Under its old name the one file would be read alone.
        (folder / _WHOLE).rename(folder / _BODY)
        with safe_open(folder / _BODY, framework="pt") as body:
            index = {"metadata": {}, "weight_map": dict.fromkeys(body.keys(), _BODY)}
    save_file({name: head.weight.detach().cpu().contiguous()}, folder / _HEAD, metadata={"format": "pt"})
    index["weight_map"][name] = _HEAD
    (folder / _INDEX).write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        if "tie_word_embeddings" in part or part is config:
            part["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2))
