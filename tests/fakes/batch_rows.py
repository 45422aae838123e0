"""Small models and hand-made trajectories for tests of the update."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
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
from context.tokens.token_sequence import Segment, TokenSequence
from replay.records import BatchRow, DrawRecord, Trajectory
from tests.fakes.records import AUTHORS, RUN, trajectory

VOCABULARY = 23
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
_CODES = {"u": "user", "e": "env", "l": "llm", "d": "llm(do_not_train)", "x": "demonstration"}


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


def segment(authors: str, log_probs: Sequence[float] = (), *, seed: int = 0) -> Segment:
    """Random tokens, a letter each: user, env, llm, do_not_train, demonstration (x); `log_probs` of sampled ones."""
    rng = np.random.default_rng(seed)
    codes = np.array([AUTHORS.code(_CODES[letter]) for letter in authors], np.uint8)
    action = AUTHORS.has_behavior(codes)
    behavior = np.full(len(authors), np.nan, np.float32)
    behavior[action] = log_probs if len(log_probs) else rng.uniform(-4.0, -1.0, int(action.sum()))
    ids = rng.integers(0, VOCABULARY, len(authors)).astype(np.int32)
    return Segment(TokenSequence(ids, codes, behavior, np.where(action, 0, -1).astype(np.int32)))


def row(
    id: str, *parts: Segment, advantage: float = 1.0, stream: Any = "fresh", group: str = "g", temperature: float = 1.0
) -> BatchRow:
    made = trajectory(
        id,
        segments=parts,
        messages=(),
        group=group,
        advantage=advantage,
        temperature=temperature,
        num_tokens=sum(len(s.tokens) for s in parts),
        num_action_tokens=1,
        policy_version_min=0,
        policy_version_max=0,
        mean_behavior_log_prob=-1.0,
        min_behavior_log_prob=-1.0,
    )
    return batch_row(made, stream, advantage=advantage)


def batch_row(trajectory: Trajectory, stream: str = "fresh", *, staleness: int | None = None, **more: Any) -> BatchRow:
    """A row of a batch of the second iteration."""
    draw = DrawRecord(RUN, 2, 0, trajectory.id, stream, probability=None, staleness=staleness)
    return BatchRow(trajectory, draw, **more)


def ragged(*, fresh: int = 6, replayed: int = 3) -> list[BatchRow]:
    """Ragged rows of both streams: groups of three, two-segment trajectories, zero and unequal advantages."""
    rng = np.random.default_rng(7)
    rows = []
    for index in range(fresh + replayed):
        parts = [
            segment(
                "u" * int(rng.integers(1, 5)) + "l" * int(rng.integers(1, 6)) + "ee" + "l" * int(rng.integers(1, 4)),
                seed=100 * index + part,
            )
            for part in range(1 + index % 2)
        ]
        is_fresh = index < fresh
        rows.append(
            row(
                f"t{index}",
                *parts,
                advantage=[0.5, -1.25, 0.0, 1.0][index % 4],
                stream="fresh" if is_fresh else "replay",
                group=f"g{index // 3}" if is_fresh else f"old{index}",
                temperature=1.0 if is_fresh else 0.8,
            )
        )
    return rows


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


def stored_off_by(item: BatchRow, nats: float) -> BatchRow:
    """A row as a generator stores it whose log-probs are wrong by so much."""
    stored = (part.tokens.behavior_log_probs for part in item.trajectory.segments)
    return with_log_probs(item, [log_probs + np.float32(nats) for log_probs in stored])


def with_log_probs(item: BatchRow, log_probs: Sequence[Any]) -> BatchRow:
    """The same tokens with these behavior log-probs, an array for each segment."""
    parts = tuple(
        replace(part, tokens=replace(part.tokens, behavior_log_probs=np.asarray(values, np.float32)))
        for part, values in zip(item.trajectory.segments, log_probs, strict=True)
    )
    return replace(item, trajectory=replace(item.trajectory, segments=parts))
