"""Every objective and correction: how rows are cut, ordered and split into segments changes nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from agentloop.algorithms.kl import Estimator, KlGradient
from agentloop.config import RunConfig
from agentloop.config.sections.loss import OBJECTIVE_NAMES
from agentloop.learning.batch import Batch, ScoredBatch
from agentloop.learning.gradients import corrected
from agentloop.models.actor import Actor
from context.tokens.token_sequence import Segment, TokenSequence
from replay.records import BatchRow
from tests.fakes.batch_rows import (
    AUTHORS,
    aggregated_by,
    gradients,
    mixed_rows,
    row,
    run_config,
    scored_rows,
    segment,
    tiny_actor,
)

WIDE = {"gspo": {"clip_low": 0.9, "clip_high": 9.0}, "gmpo": {"log_ratio_low": 3.0, "log_ratio_high": 3.0}}
"""Old and new weights of these tests are far apart: the usual bounds would clip everything."""
OWN = """
def spread(inputs, *, power):
    ratios = inputs.trajectory_mean(inputs.log_ratios).exp()
    return -inputs.advantages * ratios**power
"""
CORRECTIONS: list[dict[str, Any]] = [
    {"kind": kind, "level": level, "mean": mean, **bounds}
    for kind, bounds in (
        ("truncate", {"ratio_high": 2.0}),
        ("mask", {"ratio_low": 0.2, "ratio_high": 5.0}),
        ("rejection", {"ratio_low": 0.2}),
        ("v_trace", {"ratio_high": 1.5}),
    )
    for level, mean in (("token", "product"), ("turn", "product"), ("sequence", "geometric"))
]


def streams(name: str, tmp_path: Path) -> dict[str, Any]:
    """Of one objective for both streams, with rows of unknown log-probs among them."""
    if name == "own":
        (tmp_path / "own.py").write_text(OWN)
        part: dict[str, Any] = {"objective": {"name": f"{tmp_path / 'own.py'}:spread", "options": {"power": 0.5}}}
    else:
        part = {"objective": {"name": name, **WIDE.get(name, {})}}
    fresh = {**part, "anchor": "behavior" if name == "exgrpo" else "old", "missing_log_probs": "luffy"}
    return {"fresh": fresh, "replay": {**part, "missing_log_probs": "recompute"}}


def rows_to_learn() -> list[BatchRow]:
    demonstrated = [
        row("x0", segment("uuxle", seed=90), segment("ullel", seed=91), advantage=0.7),
        row("x1", segment("uxxel", seed=92), advantage=-0.6, stream="replay", group="old"),
    ]
    return [*mixed_rows(), *demonstrated]


def split(trajectory: BatchRow) -> BatchRow:
    """The same tokens after the same tokens: a segment for the last turn, with all before it shown again."""

    def halves(whole: Segment) -> list[Segment]:
        tokens = whole.tokens
        action = AUTHORS.is_action(tokens.authors)
        middle = int(np.flatnonzero(action[1:] & ~action[:-1])[-1]) + 1
        begun = TokenSequence(*(part[:middle] for part in _arrays(tokens)))
        authors, behavior, versions = (part.copy() for part in _arrays(tokens)[1:])
        authors[:middle], behavior[:middle], versions[:middle] = AUTHORS.code("history"), np.nan, -1
        return [Segment(begun), Segment(TokenSequence(tokens.token_ids, authors, behavior, versions))]

    segments = [half for whole in trajectory.trajectory.segments for half in halves(whole)]
    return replace(trajectory, trajectory=replace(trajectory.trajectory, segments=tuple(segments)))


def _arrays(tokens: TokenSequence) -> tuple[Any, ...]:
    return tokens.token_ids, tokens.authors, tokens.behavior_log_probs, tokens.policy_versions


@cache
def actor_of(seed: int, dtype: torch.dtype = torch.float64) -> Actor:
    """What models do with passes, order and segments is the matter of test_layout: one layer is enough here."""
    return tiny_actor(dtype, seed=seed, num_hidden_layers=1)


def learned(
    rows: list[BatchRow], config: RunConfig, dtype: torch.dtype = torch.float64
) -> tuple[float, Tensor, dict[str, float]]:
    actor, old = actor_of(0, dtype), actor_of(3, dtype)
    scored: ScoredBatch
    ref = actor_of(2, dtype) if config.kl.loss_coef > 0 else None
    scored, metrics = corrected(scored_rows(actor, rows, old=old, ref=ref), config.loss)
    loss, gradient, totals = gradients(actor, scored, config)
    return loss, gradient, metrics | totals.metrics()


def assert_equal(config: RunConfig, variants: list[tuple[list[BatchRow], RunConfig]], dtype: torch.dtype) -> None:
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    loss, gradient, metrics = learned(rows_to_learn(), config, dtype)
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) > 1e-4
    for rows, changed in variants:
        other_loss, other, other_metrics = learned(rows, changed, dtype)
        assert float((other - gradient).abs().max()) <= tolerance * float(gradient.abs().max())
        assert other_loss == pytest.approx(loss, rel=10 * tolerance)
        assert other_metrics == pytest.approx(metrics, rel=10 * tolerance, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", [*OBJECTIVE_NAMES, "own"])
def test_objective_does_not_depend_on_passes_row_order_or_segments(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    loss = {**streams(name, tmp_path), "aggregation": "seq-mean-token-mean"}
    config = run_config(loss=loss)
    rows = rows_to_learn()
    order = np.random.default_rng(0).permutation(len(rows))
    variants = [(rows, run_config(loss=loss, batch={"micro_batch_tokens": most})) for most in (1, 30)]
    variants += [([rows[i] for i in order], config), ([split(item) for item in rows], config)]
    assert_equal(config, variants, dtype)


@pytest.mark.parametrize(
    ("estimator", "gradient"), [("k3", "plain"), ("abs", "straight_through"), ("k1", "importance")]
)
@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_regularised_loss_does_not_depend_on_passes_row_order_or_segments(
    name: str, estimator: str, gradient: str, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "loss": {**streams(name, tmp_path), "aggregation": "seq-mean-token-mean", "entropy_coef": 0.02},
        "kl": {"loss_coef": 0.1, "loss_estimator": estimator, "loss_gradient": gradient},
    }
    config, rows = run_config(**sections), rows_to_learn()
    order = np.random.default_rng(0).permutation(len(rows))
    variants = [(rows, run_config(**sections, batch={"micro_batch_tokens": most})) for most in (1, 30)]
    variants += [([rows[i] for i in order], config), ([split(item) for item in rows], config)]
    assert_equal(config, variants, torch.float64)
    for part in ("kl", "loss"):
        weaker = {"kl": {"loss_coef": 0.0}, "loss": {"entropy_coef": 0.0}}[part]
        without = run_config(**{**sections, part: {**sections[part], **weaker}})
        assert learned(rows, without)[0] != pytest.approx(learned(rows, config)[0], rel=1e-4)


class Told(Actor):
    """Says given log-probs and entropies of a batch's tokens."""

    def __init__(self, actor: Actor, batch: Batch, log_probs: Tensor, entropies: Tensor) -> None:
        super().__init__(actor.model)
        self._token_ids, self._said = batch.token_ids, (log_probs, entropies)

    def log_probs(self, token_ids: Tensor, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Rows come in an order of the passes."""
        log_probs, entropies = self._said
        rows = (token_ids[:, None] == self._token_ids).all(dim=2).nonzero()[:, 1]
        return log_probs[rows], entropies[rows]


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [
        (estimator, gradient)
        for estimator in get_args(Estimator)
        for gradient in get_args(KlGradient)
        if gradient != "importance" or estimator in ("k1", "k3")
    ],
)
def test_masked_tokens_get_no_gradient_from_the_kl_or_the_entropy_bonus(estimator: str, gradient: str) -> None:
    config = run_config(
        loss={"fresh": {"objective": "reinforce"}, "replay": {"objective": "reinforce"}, "entropy_coef": 0.02},
        kl={"loss_coef": 0.1, "loss_estimator": estimator, "loss_gradient": gradient},
    )
    actor = actor_of(0)
    rows = [*(replace(item, advantage=0.0) for item in mixed_rows()), row("n", segment("uldedl"), advantage=0.0)]
    scored = scored_rows(actor, rows, old=actor_of(3), ref=actor_of(2))
    mask = scored.batch.loss_mask
    generator = torch.Generator().manual_seed(0)
    log_probs, entropies = (-3 * torch.rand((2, *mask.shape), generator=generator, dtype=torch.float64)).unbind()
    said = [log_probs.clone().requires_grad_(), (-entropies).clone().requires_grad_()]
    gradients(Told(actor, scored.batch, *said), scored, config)
    for tensor in said:
        assert tensor.grad is not None
        assert bool((tensor.grad[~mask] == 0).all())
        assert bool((tensor.grad[mask] != 0).all())
    assert bool((~mask & scored.batch.response_mask).any())


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c['kind']}-{c['level']}")
def test_correction_does_not_depend_on_passes_row_order_or_segments(correction: dict[str, Any]) -> None:
    stream = {"anchor": "old", "missing_log_probs": "recompute", "correction": correction}
    loss = {"fresh": stream, "replay": stream}
    config = run_config(loss=loss)
    rows = rows_to_learn()
    order = np.random.default_rng(0).permutation(len(rows))
    variants = [(rows, run_config(loss=loss, batch={"micro_batch_tokens": 1}))]
    variants += [([rows[i] for i in order], config), ([split(item) for item in rows], config)]
    assert_equal(config, variants, torch.float64)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gpg", "bc"])
def test_mixed_loss_is_both_streams_sums_over_the_joint_denominator(name: str, mode: str, tmp_path: Path) -> None:
    loss = {**streams(name, tmp_path), **aggregated_by(mode)}
    config, rows = run_config(loss=loss), rows_to_learn()
    parts = [[item for item in rows if item.stream == stream] for stream in ("fresh", "replay")]
    if mode == "token-mean":
        shares = [sum(int(_trained(item)) for item in part) for part in parts]
    else:
        shares = [len(part) for part in parts]
    alone = [learned(part, config) for part in parts]
    # Alone, a stream's loss is its sum over its own denominator: times that, over the joint one.
    expected_loss = sum(share * found[0] for share, found in zip(shares, alone, strict=True)) / sum(shares)
    expected = sum(share * found[1] for share, found in zip(shares, alone, strict=True)) / sum(shares)
    mixed_loss, mixed, metrics = learned(rows, config)
    assert mixed_loss == pytest.approx(expected_loss, rel=1e-12)
    assert isinstance(expected, Tensor)
    assert float((mixed - expected).abs().max()) <= 1e-10 * float(expected.abs().max())
    for stream, found in zip(("fresh", "replay"), alone, strict=True):
        assert metrics[f"actor/{stream}/pg_loss"] == pytest.approx(found[0], rel=1e-12)


def _trained(item: BatchRow) -> int:
    return sum(int(AUTHORS.is_trained(part.tokens.authors).sum()) for part in item.trajectory.segments)


@pytest.mark.parametrize("name", [*OBJECTIVE_NAMES, "own"])
def test_metrics_of_one_stream_do_not_move_when_the_other_changes(name: str, tmp_path: Path) -> None:
    rows = rows_to_learn()
    loss = streams(name, tmp_path)
    before = learned(rows, run_config(loss=loss))[2]
    other = {"objective": "cispo", "anchor": "old", "correction": {"kind": "mask", "ratio_high": 1.1}}
    changed = {"fresh": loss["fresh"], "replay": {**other, "missing_log_probs": "bc"}}
    moved = [replace(item, advantage=3 * item.advantage - 1) if item.stream == "replay" else item for item in rows]
    after = learned([*moved, row("new", segment("ulllell", seed=8), stream="replay")], run_config(loss=changed))[2]
    of_fresh = {key for key in before if key.startswith("actor/fresh/")}
    assert len(of_fresh) >= 8
    assert {key: after[key] for key in of_fresh} == pytest.approx({key: before[key] for key in of_fresh}, rel=1e-12)
    assert {key: after[key] for key in before if key not in of_fresh} != pytest.approx(before, rel=1e-3)


def test_all_fresh_batch_is_plain_ppo_whatever_the_replay_stream_is_told() -> None:
    rows = mixed_rows(replayed=0)
    plain = learned(rows, run_config())
    replay = {"objective": "gspo", "anchor": "old", "correction": {"kind": "v_trace", "ratio_high": 1.0}}
    other = learned(rows, run_config(loss={"replay": {**replay, "missing_log_probs": "luffy"}}))
    assert plain[0] == other[0]
    assert torch.equal(plain[1], other[1])
    assert plain[2] == other[2]

    # Plain PPO, written out: mean over trained tokens of max(-A r, -A clip(r, 0.8, 1.28)), at most 3 |A| where A < 0.
    actor, old = actor_of(0), actor_of(3)
    scored = scored_rows(actor, rows, old=old)
    batch = scored.batch
    log_probs, _ = actor.log_probs(batch.token_ids, batch.attention_mask, batch.response_mask, batch.temperature)
    r, a = (log_probs - scored.old_log_probs)[batch.loss_mask].exp(), batch.advantages[batch.loss_mask].double()
    token = torch.maximum(-a * r, -a * r.clamp(0.8, 1.28))
    whole = torch.where(a < 0, torch.minimum(token, -3 * a), token).mean()
    actor.model.zero_grad(set_to_none=True)
    torch.autograd.backward(whole)
    expected = torch.cat([p.grad.flatten() for p in actor.model.parameters() if p.grad is not None])
    assert plain[0] == pytest.approx(whole.item(), rel=1e-12)
    assert float((plain[1] - expected).abs().max()) <= 1e-10 * float(expected.abs().max())
