"""A small model for tests of the update, and what is computed with it."""

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from agentloop.config import RunConfig
from agentloop.learning.batch import Batch, ScoredBatch, build_batch
from agentloop.learning.passes import accumulate_gradients, score
from agentloop.learning.stream_losses import stream_losses
from agentloop.learning.trainer import Trainer
from agentloop.learning.update_stats import UpdateTotals
from agentloop.models.actor import Actor
from replay.records import BatchRow
from tests.fakes.batch_rows import VOCABULARY, with_log_probs
from tests.fakes.records import AUTHORS

LOSS: dict[str, Any] = {
    "fresh": {"anchor": "old", "objective": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}},
    "replay": {"anchor": "behavior", "objective": {"name": "ppo_clip", "clip_low": 0.3, "clip_high": 0.6}},
}
"""Bounds and anchors that differ between the streams."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}


def tiny_actor(dtype: torch.dtype = torch.float64, *, seed: int = 0, **architecture: Any) -> Actor:
    """Two layers of width 16; wide initial weights, so that different tokens have different log-probs."""
    settings: dict[str, Any] = {**SIZES, "head_dim": 8, "tie_word_embeddings": True, "pad_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**settings | architecture))
    # The architecture's own norms compute in float32 whatever the model's type; these keep to it.
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Qwen3RMSNorm):
                setattr(parent, name, torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))
    return Actor(model.to(dtype))


def run_config(**sections: dict[str, Any]) -> RunConfig:
    """Rows here bring their own groups and advantages, so the size of fresh ones only has to fit any mini-batch."""
    batch = {"group_size": 1, **sections.pop("batch", {})}
    return RunConfig.model_validate({"algorithm": "reinforce", "batch": batch, **sections})


def trainer(actor: Actor, config: RunConfig, *, reference: Actor | None = None) -> Trainer:
    return Trainer(actor, config, authors=AUTHORS, reference=reference)


def weights_of(actor: Actor) -> Tensor:
    """All weights in one vector, copied."""
    return torch.cat([p.detach().flatten().clone() for p in actor.model.parameters()])


def rescore(actor: Actor, rows: list[BatchRow], *, old: Actor, ref: Actor | None = None) -> ScoredBatch:
    batch = build_batch(rows, AUTHORS).to(actor.device)
    references = None if ref is None else score(ref, batch, max_tokens=64)[0]
    return ScoredBatch(batch, score(old, batch, max_tokens=64)[0], references)


def gradients(actor: Actor, scored: ScoredBatch, config: RunConfig) -> tuple[float, Tensor, UpdateTotals]:
    actor.model.zero_grad(set_to_none=True)
    totals = UpdateTotals(scored.batch.replayed)
    step = accumulate_gradients(actor, scored, config, losses=stream_losses(config.loss), totals=totals)
    vectors = [torch.zeros_like(p) if p.grad is None else p.grad for p in actor.model.parameters()]
    return step.loss, torch.cat([v.flatten() for v in vectors]), totals


def written_log_probs(actor: Actor, batch: Batch) -> dict[tuple[int, int], Tensor]:
    """Of every action token by row and position: row by row, on whole logits, with a gradient."""
    found = {}
    for line, length in enumerate(batch.lengths):
        ids = batch.token_ids[line, :length]
        scores = torch.log_softmax(actor.model(input_ids=ids[None]).logits[0] / batch.temperature[line], dim=-1)
        for t in batch.response_mask[line].nonzero()[:, 0].tolist():
            found[line, t] = scores[t - 1, ids[t]]
    return found


def sampled_by(actor: Actor, rows: list[BatchRow]) -> list[BatchRow]:
    """The same rows with the log-probs `actor` gives their action tokens as the stored ones."""
    batch = build_batch(rows, AUTHORS)
    log_probs = torch.where(batch.response_mask, score(actor, batch, max_tokens=64)[0], torch.nan).float()
    rest = iter(log_probs)
    own = [[next(rest)[: len(part.tokens)].numpy() for part in item.trajectory.segments] for item in rows]
    return [with_log_probs(item, values) for item, values in zip(rows, own, strict=True)]
