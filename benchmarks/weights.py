"""What training keeps beside the weights, and a checkpoint on disk: each optimizer, and LoRA.

One step on a model of 41.6 million float32 weights. Bytes are counted on the tensors that are there and on the files
that are written, so they are the same on every machine; activations are not in them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentloop.config import RunConfig
from agentloop.distributed.tensor_files import write_tensors
from agentloop.learning.optimizer import WeightOptimizer
from agentloop.models.adapters import add_adapters
from agentloop.runs.checkpoint import save_checkpoint
from benchmarks._goals import show

LORA = "adamw, LoRA of rank 16"
WAYS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": {"name": "sgd"}},
    "adafactor": {"optimizer": {"name": "adafactor"}},
    "muon": {"optimizer": {"name": "muon"}},
    LORA: {"lora": {"rank": 16}},
}
GOALS = {f"{LORA}: checkpoint, of adamw's": "<= 0.05", f"{LORA}: memory, of adamw's": "<= 0.35"}
TOKENS = 64
MIB = 1 << 20


def build_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32_000,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            tie_word_embeddings=True,
        )
    )


def measure(way: Mapping[str, Any], folder: Path) -> dict[str, float]:
    config = RunConfig.model_validate(way)
    model: Any = build_model()
    if config.lora.rank > 0:
        add_adapters(model, config, "base")
    optimizer = WeightOptimizer(model, config.optimizer)
    tokens = torch.randint(32_000, (1, TOKENS))
    model(input_ids=tokens, labels=tokens).loss.backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    optimizer.step(optimizer.gradient_norm())
    state = sum(tensor.nbytes for tensor in optimizer.state().values())
    held = sum(parameter.nbytes for parameter in model.parameters())
    save_checkpoint(folder / "000001", model.save_pretrained, partial(write_tensors, tensors=optimizer.state()), {})
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6,
        "gradients": gradients / MIB,
        "state": state / MIB,
        "memory": (held + gradients + state) / MIB,
        "checkpoint": written / MIB,
    }


def main() -> dict[str, float]:
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(way, Path(folder))
    print(f"{'MiB':<24}{'trained, M':>12}{'gradients':>12}{'state':>8}{'memory':>8}{'checkpoint':>12}")
    for name, row in found.items():
        print(
            f"{name:<24}{row['trained']:>12.2f}{row['gradients']:>12.1f}{row['state']:>8.1f}{row['memory']:>8.1f}"
            f"{row['checkpoint']:>12.1f}"
        )
    full = found["adamw"]
    return {
        f"{name}: {figure}, of adamw's": row[figure] / full[figure]
        for name, row in found.items()
        for figure in ("memory", "checkpoint")
        if name != "adamw"
    }


if __name__ == "__main__":
    figures = main()
    show(figures, GOALS)
    print(json.dumps(figures), file=sys.stderr)
