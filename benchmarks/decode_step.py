"""A decode step of the engine in this process: as it is, and with keys and values in fixed buffers, as one CUDA graph.

Rows of prompts are shown to a random Llama, then a token of each at a time. Each contender is fed the same tokens; on a
GPU weights are bfloat16. On a CPU a tiny shape shows only that both say the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from agentloop.generation.cache import EpisodeCache
from agentloop.generation.fixed_cache import FixedCache
from agentloop.generation.generator import GenerationRequest
from benchmarks._goals import show

PROMPT = 256
"""Tokens."""
GOALS = {"ms_1_3b_graph": "<= 15", "of_time_1_3b": "<= 0.34", "of_time_135m": "<= 0.34"}
Shape = tuple[int, int, int, int, int, int]
"""Layers, width, intermediate width, heads, heads of keys, words."""
SHAPES: dict[str, Shape] = {
    "135m": (30, 576, 1536, 9, 3, 49_152),
    "1_3b": (24, 2048, 5504, 16, 16, 32_000),
}
_TINY: Shape = (2, 32, 64, 4, 2, 64)


class Cache(Protocol):
    def admit(self, requests: Sequence[GenerationRequest]) -> None: ...

    def feed(self, chunks: Sequence[list[int]]) -> Tensor: ...


def llama(shape: Shape, device: torch.device) -> PreTrainedModel:
    layers, width, between, heads, key_heads, words = shape
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=between,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=words,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: PreTrainedModel = LlamaForCausalLM(config).to(device=device, dtype=kind).eval()
    return model


@torch.no_grad()
def decoded(cache: Cache, *, rows: int, steps: int, words: int, prompt: int = PROMPT) -> tuple[float, Tensor]:
    """Milliseconds of a step, the median after a quarter of them; and the logits of the last one, [rows, words]."""
    made = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, words, (rows, prompt + steps), generator=made).tolist()
    cache.admit([GenerationRequest(row, ids[:prompt], steps) for row, ids in enumerate(tokens)])
    logits = cache.feed([ids[:prompt] for ids in tokens])
    times = []
    for step in range(prompt, prompt + steps):
        began = time.perf_counter()
        logits = cache.feed([[ids[step]] for ids in tokens])
        logits.argmax(dim=-1).tolist()  # as sampling, waits for the device
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[steps // 4 :]), logits


def main() -> dict[str, float]:
    on_gpu = torch.cuda.is_available()
    device, rows, steps = torch.device("cuda" if on_gpu else "cpu"), 128 if on_gpu else 4, 128 if on_gpu else 12
    found: dict[str, float] = {}
    contenders: dict[str, Callable[[PreTrainedModel], Cache]] = {"today": EpisodeCache, "graph": FixedCache}
    for name, shape in (SHAPES if on_gpu else {"tiny": _TINY}).items():
        model = llama(shape, device)
        logits = []
        for contender, make in contenders.items():
            found[f"ms_{name}_{contender}"], last = decoded(make(model), rows=rows, steps=steps, words=shape[-1])
            logits.append(last.float().log_softmax(-1))
        found[f"of_time_{name}"] = found[f"ms_{name}_graph"] / found[f"ms_{name}_today"]
        found[f"nats_apart_{name}"] = float((logits[0] - logits[1]).abs().max())
    show(found, GOALS)
    return found


if __name__ == "__main__":
    main()
