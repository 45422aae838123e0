"""Tokens per CPU-second of one optimizer step: rows by length, packed, and in one padded batch.

Forward, loss, backward and AdamW of the quickstart's architecture on 64 multi-turn rows of three kinds: episodes as the
quickstart's are, a long tail (results of up to 400 tokens), and groups (8 episodes have one prompt). All ways are given
the same tokens, masks, advantages and old log-probs; their losses and gradients are compared before they are timed.
"""

import copy
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentloop.config import RunConfig
from agentloop.learning.batch import Batch, ScoredBatch, build_batch
from agentloop.learning.optimizer import WeightOptimizer
from agentloop.learning.passes import accumulate_gradients, score
from agentloop.learning.stream_losses import stream_losses
from agentloop.learning.update_stats import UpdateTotals
from agentloop.models.actor import Actor
from context.authors import ENV, LLM, USER
from context.tokens.token_sequence import Segment
from replay.records import BatchRow
from tests.fakes.batch_rows import row
from tests.fakes.records import AUTHORS, tokens

VOCABULARY = 560
ROWS = 64
PROMPT, REPLY, RESULT = 96, 14, 26
LONGEST_RESULT = 400
GROUP = 8
KINDS = ("episodes", "long_tail", "groups")


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


def make_batch(kind: str, *, rows: int = ROWS) -> Batch:
    """Rows as an iteration has them, of random tokens; every row has an advantage."""
    rng = random.Random(0)
    made: list[BatchRow] = []
    prompt: list[int] = []
    for number in range(rows):
        if kind != "groups" or number % GROUP == 0:
            prompt = [rng.randrange(3, VOCABULARY) for _ in range(PROMPT)]
        ids, authors = list(prompt), [USER] * PROMPT
        for _ in range(rng.randint(2, 9)):
            rare = kind == "long_tail" and rng.random() < 0.1
            result = rng.randint(RESULT, LONGEST_RESULT) if rare else RESULT
            ids += [rng.randrange(3, VOCABULARY) for _ in range(REPLY + result)]
            authors += [LLM] * REPLY + [ENV] * result
        advantage = rng.choice((-1.0, 1.0)) * rng.uniform(0.3, 2.5)
        made.append(row(str(number), Segment(tokens(ids, authors, log_prob=0.0)), advantage=advantage))
    return build_batch(made, AUTHORS)


def scored_batch(model: PreTrainedModel, kind: str, *, rows: int = ROWS) -> ScoredBatch:
    """With old log-probs that the policy has moved away from a little, so that some ratios are clipped."""
    batch = make_batch(kind, rows=rows)
    torch.manual_seed(1)
    now, _ = score(Actor(model), batch, max_tokens=1536)
    return ScoredBatch(batch, (now + 0.2 * torch.randn_like(now)) * batch.response_mask, None)


class Step:
    """One optimizer step as the trainer makes it, in passes of so many padded tokens."""

    def __init__(self, model: PreTrainedModel, scored: ScoredBatch, *, packs: bool = False, tokens: int = 0) -> None:
        """`tokens` 0: as many as by default."""
        self._model, self._scored = copy.deepcopy(model), scored
        self._actor = Actor(self._model, packs=packs)
        self._config = RunConfig.model_validate({"batch": {"micro_batch_tokens": tokens} if tokens else {}})
        self._losses = stream_losses(self._config.loss)
        self.optimizer = WeightOptimizer(self._model, self._config.optimizer)

    def accumulate(self) -> float:
        totals = UpdateTotals(self._scored.batch.replayed)
        return accumulate_gradients(self._actor, self._scored, self._config, losses=self._losses, totals=totals).loss

    def step(self) -> None:
        self.accumulate()
        self.optimizer.step(self.optimizer.gradient_norm())

    def gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self._model.parameters() if p.grad is not None])


WAYS: Mapping[str, dict[str, Any]] = {"by_length": {}, "packed": {"packs": True}, "one_padded": {"tokens": 10**9}}


def check_alike(found: Mapping[str, Step]) -> None:
    """Raises ValueError unless all ways give one loss and one gradient, to float32's rounding."""
    losses = {name: way.accumulate() for name, way in found.items()}
    gradients = {name: way.gradient() for name, way in found.items()}
    first = gradients["by_length"]
    for name, way in found.items():
        apart = float((gradients[name] - first).norm() / first.norm())
        if abs(losses[name] - losses["by_length"]) > 1e-5 or apart > 1e-4:
            raise ValueError(
                f"{name} must have the loss and gradient of by_length, got losses {losses[name]} and "
                f"{losses['by_length']}, and gradients that differ by {apart:.1e} of their norm."
            )
        way.optimizer.clear_gradients()


def measure(kind: str, *, names: Sequence[str] = tuple(WAYS), rows: int = ROWS, rounds: int = 5) -> dict[str, float]:
    """Medians of each way's real tokens per CPU-second, and of the paired ratios; by_length is one of `names`."""
    torch.set_num_threads(1)
    model = tiny_model()
    scored = scored_batch(model, kind, rows=rows)
    found = {name: Step(model, scored, **WAYS[name]) for name in names}
    check_alike(found)
    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, way in found.items():
            began = time.process_time()
            way.step()
            if number:  # the first step pays for AdamW's moments
                times[name].append(time.process_time() - began)
    tokens = int(scored.batch.attention_mask.sum())
    figures = {f"{kind}_{name}_tokens_per_s": tokens / statistics.median(each) for name, each in times.items()}
    for name in names:
        if name != "by_length":
            pairs = zip(times[name], times["by_length"], strict=True)
            figures[f"{kind}_speed_to_{name}"] = statistics.median(other / ours for other, ours in pairs)
    return figures


def main() -> dict[str, float]:
    print(f"one optimizer step on {ROWS} rows; speed_to_X is by_length's speed over X's")
    return {name: figure for kind in KINDS for name, figure in measure(kind).items()}
