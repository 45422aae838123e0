"""A decode step of the engine in this process: with keys and values that grow, with fixed buffers and recorded steps,
and by transformers' continuous batching, which returns log-probs too.

Rows of prompts are shown to a random Llama, then a token of each at a time. The caches are fed the same tokens; what
continuous batching samples is scored by a plain forward. Weights are bfloat16 on a GPU; for the engine itself, sampling
included, they are float32 under autocast, as in training. On a CPU a tiny shape shows only that all say the same.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from agentloop.config.sections.model import ComputeSection
from agentloop.engines.generator import GenerationRequest
from agentloop.engines.local.cache import EpisodeCache, KeyValueCache
from agentloop.engines.local.fixed_cache import FixedCache
from agentloop.engines.local.local_generator import LocalGenerator
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


def llama(shape: Shape, device: torch.device, kind: torch.dtype) -> PreTrainedModel:
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
    model: PreTrainedModel = LlamaForCausalLM(config).to(device=device, dtype=kind).eval()
    return model


def prompts(rows: int, steps: int, words: int) -> list[list[int]]:
    """And what follows them."""
    made = torch.Generator().manual_seed(1)
    return torch.randint(0, words, (rows, PROMPT + steps), generator=made).tolist()


@torch.no_grad()
def decoded(cache: KeyValueCache, tokens: list[list[int]]) -> tuple[float, Tensor]:
    """Milliseconds of a step, the median after a quarter of them; and the logits of the last one, [rows, words]."""
    cache.admit([GenerationRequest(row, ids[:PROMPT], 1) for row, ids in enumerate(tokens)])
    logits = cache.feed([ids[:PROMPT][cache.fed(row) :] for row, ids in enumerate(tokens)])
    ends = [time.perf_counter()]
    for step in range(PROMPT, len(tokens[0])):
        logits = cache.feed([ids[step : step + 1] for ids in tokens])
        logits.argmax(dim=-1).tolist()  # as sampling, waits for the device
        ends.append(time.perf_counter())
    return median_step(ends), logits.float().log_softmax(-1)


def engine(model: PreTrainedModel, tokens: list[list[int]]) -> float:
    """Milliseconds of a step, sampling included, once its steps are recorded."""
    generator = LocalGenerator(model, stop_ids=frozenset(), compute=ComputeSection(autocast="bfloat16"), as_on_gpu=True)
    steps, took = len(tokens[0]) - PROMPT, {}
    for most in (steps, 1, steps):
        generator.begin(seed=0, temperature=1.0)
        began = time.perf_counter()
        generator.generate([GenerationRequest(row, ids[:PROMPT], most) for row, ids in enumerate(tokens)])
        took[most] = time.perf_counter() - began
    return 1000 * (took[steps] - took[1]) / (steps - 1)


def continuous(model: Any, tokens: list[list[int]]) -> tuple[float, float]:
    """Milliseconds of a step, sampling included; and the most that the first row's log-probs are off, in nats."""
    steps = len(tokens[0]) - PROMPT
    config = ContinuousBatchingConfig(
        return_logprobs=True, page_size=256, num_blocks=len(tokens) * (1 + len(tokens[0]) // 256), max_batch_tokens=8192
    )
    sampling = GenerationConfig(max_new_tokens=steps, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(
        [ids[:PROMPT] for ids in tokens], sampling, continuous_batching_config=config, record_timestamps=True
    )
    first = next(iter(found.values()))
    with torch.no_grad():
        row = torch.tensor([tokens[0][:PROMPT] + first.generated_tokens], device=model.device)
        scores = model(row).logits[0, PROMPT - 1 : -1].float().log_softmax(-1)
    stored = torch.tensor(first.logprobs, device=model.device)
    return median_step(first.timestamps), float((scores.gather(1, row[0, PROMPT:, None])[:, 0] - stored).abs().max())


def median_step(ends: list[float]) -> float:
    """Milliseconds, of the last three quarters of the steps, for the first ones are recorded or wait for prompts."""
    times = [1000 * (end - began) for began, end in itertools.pairwise(ends)]
    return statistics.median(times[len(times) // 4 :])


def main() -> dict[str, float]:
    on_gpu = torch.cuda.is_available()
    device, rows, steps = torch.device("cuda" if on_gpu else "cpu"), 128 if on_gpu else 4, 128 if on_gpu else 12
    kind = torch.bfloat16 if on_gpu else torch.float32
    found: dict[str, float] = {}
    for name, shape in (SHAPES if on_gpu else {"tiny": _TINY}).items():
        model, tokens = llama(shape, device, kind), prompts(rows, steps, shape[-1])
        found[f"ms_{name}_growing"], growing = decoded(EpisodeCache(model), tokens)
        found[f"ms_{name}_graph"], fixed = decoded(FixedCache(model), tokens)
        found[f"ms_{name}_continuous"], found[f"nats_apart_{name}_continuous"] = continuous(model, tokens)
        found[f"ms_{name}_engine"] = engine(llama(shape, device, torch.float32), tokens)
        found[f"of_time_{name}"] = found[f"ms_{name}_graph"] / found[f"ms_{name}_growing"]
        found[f"nats_apart_{name}"] = float((growing - fixed).abs().max())
    show(found, GOALS)
    return found


if __name__ == "__main__":
    main()
