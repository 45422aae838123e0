"""Episodes per CPU-second: the rollout engine against `model.generate`, which re-prefills the history every turn.

Both act with the same weights on the same scripted conversations of the quickstart's shape (a prompt of 60 tokens, five
replies of at most 14, tool results of 17), alternating in one run. `generate` is not even asked for log-probs.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentloop.engines import GenerationRequest
from agentloop.engines.local.local_generator import LocalGenerator

GOALS = {"speedup": ">= 2"}
EPISODES = 128
TURNS = 5
PROMPT, REPLY, RESULT = 60, 14, 17
VOCABULARY = 560
STOP = 2


class Engine(Protocol):
    def replies(self, prompts: Sequence[tuple[int, list[int]]]) -> list[list[int]]: ...


class OurEngine:
    """The local generator, with log-probs and entropies."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._generator = LocalGenerator(model, stop_ids=frozenset([STOP]))
        self._generator.begin(seed=0, temperature=1.0)

    def replies(self, prompts: Sequence[tuple[int, list[int]]]) -> list[list[int]]:
        requests = [GenerationRequest(episode, ids, REPLY) for episode, ids in prompts]
        return [list(completion.token_ids) for completion in self._generator.generate(requests)]


class GenerateEngine:
    """What a user would write: left-padded prompts into `model.generate`, turn by turn."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        torch.manual_seed(0)

    def replies(self, prompts: Sequence[tuple[int, list[int]]]) -> list[list[int]]:
        width = max(len(ids) for _, ids in prompts)
        padded = torch.tensor([[0] * (width - len(ids)) + ids for _, ids in prompts])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for _, ids in prompts])
        with torch.inference_mode():
            output = self._model.generate(
                padded,
                attention_mask=mask,
                max_new_tokens=REPLY,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=STOP,
                pad_token_id=0,
            )
        return [_until_stop(row) for row in output[:, width:].tolist()]


def _until_stop(ids: list[int]) -> list[int]:
    return ids[: ids.index(STOP) + 1] if STOP in ids else ids


def tiny_model() -> PreTrainedModel:
    """The quickstart's architecture with random weights: the work per token is the same."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = Qwen3ForCausalLM(config).eval()
    return model


def act(engine: Engine, episodes: int) -> float:
    """CPU-seconds for all episodes; some end early, as real ones do."""
    rng = random.Random(0)
    prompts = {e: [rng.randrange(3, VOCABULARY) for _ in range(PROMPT)] for e in range(episodes)}
    turns = {e: rng.randint(2, TURNS) for e in prompts}
    began = time.process_time()
    for turn in range(TURNS):
        running = [(e, prompts[e]) for e in prompts if turn < turns[e]]
        for (episode, ids), reply in zip(running, engine.replies(running), strict=True):
            prompts[episode] = ids + reply + [rng.randrange(3, VOCABULARY) for _ in range(RESULT)]
    return time.process_time() - began


def measure(*, episodes: int = EPISODES, rounds: int = 5) -> dict[str, float]:
    """Median CPU-seconds of either engine over alternating rounds, and the median of the paired ratios."""
    torch.set_num_threads(1)
    model = tiny_model()
    engines: dict[str, type[Any]] = {"agentloop": OurEngine, "generate": GenerateEngine}
    for engine in engines.values():
        act(engine(model), 8)  # first calls pay for lazy set-up
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            times[name].append(act(engine(model), episodes))
    pairs = zip(times["generate"], times["agentloop"], strict=True)
    return {
        "episodes_per_cpu_second": episodes / statistics.median(times["agentloop"]),
        "episodes_per_cpu_second_generate": episodes / statistics.median(times["generate"]),
        "speedup": statistics.median(theirs / ours for theirs, ours in pairs),
    }


def main() -> dict[str, float]:
    result = measure()
    print(
        f"rollout, batch {EPISODES}: {result['episodes_per_cpu_second']:.0f} episodes per CPU-second, ",
        end="",
    )
    print(f"model.generate {result['episodes_per_cpu_second_generate']:.0f}; ", end="")
    print(f"{result['speedup']:.2f}x (goal {GOALS['speedup']})")
    return result


if __name__ == "__main__":
    print(json.dumps(main()), file=sys.stderr)
