"""The gradient of an optimizer step against the written formula, row by row on whole logits, in float64."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from agentloop.config import RunConfig
from agentloop.learning.batch import ScoredBatch
from agentloop.learning.passes import accumulate_gradients, corrected
from agentloop.learning.stream_losses import stream_losses
from agentloop.learning.update_stats import UpdateTotals
from agentloop.models.actor import Actor
from replay.records import BatchRow
from tests.fakes.batch_rows import ragged, row, segment, stored_off_by
from tests.fakes.tiny_actors import LOSS, gradients, rescore, run_config, sampled_by, tiny_actor, written_log_probs


def written_formula(actor: Actor, scored: ScoredBatch, config: RunConfig) -> tuple[float, Tensor]:
    """Every token on its own; nothing shared with the code under test but the model's forward."""
    actor.model.zero_grad(set_to_none=True)
    batch, loss = scored.batch, config.loss
    per_stream: dict[bool, dict[int, list[Tensor]]] = {False: {}, True: {}}
    for i in range(len(batch.trajectory)):
        logits = actor.model(input_ids=batch.token_ids[i : i + 1, : batch.lengths[i]]).logits[0]
        replayed = bool(batch.replay_mask[i])
        section = loss.replay if replayed else loss.fresh
        anchors = batch.behavior_log_probs[i] if section.anchor == "behavior" else scored.old_log_probs[i]
        for t in batch.loss_mask[i].nonzero()[:, 0].tolist():
            log_p = torch.log_softmax(logits[t - 1] / batch.temperature[i], dim=-1)
            chosen, a = log_p[batch.token_ids[i, t]], batch.advantages[i, t]
            r = torch.exp(chosen - anchors[t])
            clip = SimpleNamespace(**section.objective.arguments)
            token = -torch.min(a * r, a * r.clamp(1 - clip.clip_low, 1 + clip.clip_high))
            if a < 0 and clip.dual_clip is not None:
                token = torch.min(token, -a * clip.dual_clip)
            if scored.ref_log_probs is not None:
                d = scored.ref_log_probs[i, t] - chosen
                token = token + config.kl.loss_coef * (d.exp() - d - 1).clamp(max=10.0)
            token = token + loss.entropy_coef * (log_p.exp() * log_p).sum()
            per_stream[replayed].setdefault(int(batch.trajectory[i]), []).append(token * batch.loss_weights[i])
    if loss.normalise == "joint":
        total = aggregated({**per_stream[False], **per_stream[True]}, config)
    else:
        total = aggregated(per_stream[False], config) + config.replay.weight * aggregated(per_stream[True], config)
    torch.autograd.backward(total)
    vectors = [torch.zeros_like(p) if p.grad is None else p.grad for p in actor.model.parameters()]
    return total.item(), torch.cat([v.flatten() for v in vectors])


def aggregated(sequences: dict[int, list[Tensor]], config: RunConfig) -> Tensor:
    sums = [torch.stack(tokens).sum() for tokens in sequences.values()]
    means = [torch.stack(tokens).mean() for tokens in sequences.values()]
    tokens = sum(len(tokens) for tokens in sequences.values())
    length = config.loss.norm_length or float("nan")
    return {
        "token-mean": torch.stack(sums).sum() / tokens,
        "seq-mean-token-sum": torch.stack(sums).mean(),
        "seq-mean-token-mean": torch.stack(means).mean(),
        "seq-mean-token-sum-norm": torch.stack(sums).mean() / length,
    }[config.loss.aggregation]


@pytest.mark.parametrize("normalise", ["joint", "per_stream"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("regularised", [False, True])
def test_loss_and_gradient_equal_the_written_formula(mode: str, normalise: str, regularised: bool) -> None:
    length = {"norm_length": 7.0} if mode == "seq-mean-token-sum-norm" else {}
    config = run_config(
        loss={**LOSS, "aggregation": mode, "normalise": normalise, "entropy_coef": 0.01 * regularised, **length},
        kl={"loss_coef": 0.1 * regularised},
        replay={"weight": 0.5 if normalise == "per_stream" else 1.0},
        batch={"micro_batch_tokens": 40},
    )
    actor, old, ref = (tiny_actor(seed=seed) for seed in range(3))
    # What a sampler corrects for: another weight for each replayed row.
    rows = [replace(row, weight=1 / (2 + i)) if row.stream == "replay" else row for i, row in enumerate(ragged())]
    scored = rescore(actor, rows, old=old, ref=ref if regularised else None)
    expected_loss, expected = written_formula(actor, scored, config)
    loss, gradient, _ = gradients(actor, scored, config)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert (gradient - expected).abs().max() <= 1e-10 * expected.abs().max()
    assert expected.abs().max() > 1e-3


def test_rows_without_an_advantage_are_skipped_exactly() -> None:
    """Their loss is 0 x ratio, so leaving them out changes no bit but the order of the sums."""
    actor, old = tiny_actor(seed=0), tiny_actor(seed=1)
    silent = [row(f"z{i}", segment("uulll", seed=50 + i), advantage=0.0) for i in range(3)]
    config = run_config(loss=LOSS, batch={"micro_batch_tokens": 1})
    with_silent = rescore(actor, [*ragged(), *silent], old=old)
    _, gradient, totals = gradients(actor, with_silent, config)
    _, expected = written_formula(actor, with_silent, config)
    assert (gradient - expected).abs().max() <= 1e-10 * expected.abs().max()
    # In every denominator: 9 more trained tokens than without them; but not in a pass.
    trained = with_silent.batch.loss_mask.sum().item()
    assert totals.trained.sum().item() == trained
    speaking = with_silent.batch.loss_mask & (with_silent.batch.advantages != 0)
    assert totals.scored.sum().item() == speaking.sum().item()

    _, alone, _ = gradients(actor, rescore(actor, ragged(), old=old), config)
    torch.testing.assert_close(gradient, alone * (trained - 9) / trained, rtol=1e-12, atol=1e-16)


def test_segment_without_an_advantage_counts_in_the_ratio_of_its_trajectory() -> None:
    """gspo takes the mean over both segments, of which one has tokens of advantage 0 alone."""
    actor, old = tiny_actor(seed=0), tiny_actor(seed=1)
    given = (np.array([0, 1, 1], np.float32), np.zeros(4, np.float32))
    rows = [replace(row("both", segment("ull"), segment("uull", seed=1)), token_advantages=given)]
    scored = rescore(actor, rows, old=old)
    config = run_config(loss={"fresh": {"objective": {"name": "gspo", "clip_low": 0.9, "clip_high": 99.0}}})
    now = rescore(actor, rows, old=actor).old_log_probs
    drift = (now - scored.old_log_probs)[scored.batch.loss_mask]
    # -A s of two tokens, over all four.
    assert gradients(actor, scored, config)[0] == pytest.approx(-2 / 4 * float(drift.mean().exp()), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("letter", ["l", "d"])
def test_stored_log_prob_95_nats_off_gives_finite_gradients(dtype: torch.dtype, advantage: float, letter: str) -> None:
    actor = tiny_actor(dtype)
    wild = segment("uul" + letter + "l", [-1.0, -95.0, -1.0])
    rows = [row("wild", wild, stream="replay", advantage=advantage), row("tame", segment("uull"), advantage=0.5)]
    loss, gradient, _ = gradients(actor, rescore(actor, rows, old=actor), run_config(loss=LOSS))
    assert abs(loss) < float("inf")
    assert bool(gradient.isfinite().all())
    assert bool(gradient.any())


def test_a_replayed_failure_that_became_likelier_has_no_say_by_default() -> None:
    """One of 16 rows, 5 nats likelier than when it was sampled: r = 148, beyond the ceiling of 3."""
    actor = tiny_actor()
    streams = enumerate(["fresh", "replay"] * 8)
    rows = [row(f"t{i}", segment("uulll", seed=i), stream=stream, advantage=0.9) for i, stream in streams]
    *others, last = sampled_by(actor, rows)
    failure = replace(stored_off_by(last, -5.0), advantage=-0.9)
    silent = replace(failure, advantage=0.0)

    def gradient(*changed: BatchRow, **clip: float | None) -> Tensor:
        loss = {"replay": {"objective": {"name": "ppo_clip", **clip}}}
        return gradients(actor, rescore(actor, [*others, *changed], old=actor), run_config(loss=loss))[1]

    own = gradient(failure, dual_clip=None) - gradient(silent)
    assert float(own.norm()) > 20 * float(gradient(silent).norm())
    assert float(gradient(silent).norm()) > 0.1
    torch.testing.assert_close(gradient(failure), gradient(silent), rtol=0, atol=1e-12)
    # Below the ceiling it is pushed away as before: r = exp(1) = 2.72.
    nearer = replace(stored_off_by(last, -1.0), advantage=-0.9)
    assert float((gradient(nearer) - gradient(silent)).norm()) > 0.1


def test_distance_from_stored_log_probs_is_k3_over_the_fresh_tokens_that_have_a_gradient() -> None:
    """(r - 1) - log r, r = pi / old."""
    actor, old = tiny_actor(seed=0), tiny_actor(seed=1)
    scored = replace(rescore(actor, ragged(), old=old), reuses=True)
    batch, before = scored.batch, written_log_probs(old, scored.batch)
    distances = []
    for (line, t), now in written_log_probs(actor, batch).items():
        log_r = (now - before[line, t]).item()
        if batch.advantages[line, t] != 0 and not batch.replay_mask[line]:
            distances.append(min(math.exp(log_r) - 1 - log_r, 10.0))
    config = run_config(loss=LOSS, batch={"micro_batch_tokens": 40})
    totals = UpdateTotals(batch.replayed)
    step = accumulate_gradients(actor, scored, config, losses=stream_losses(config.loss), totals=totals)
    assert step.moved == pytest.approx(sum(distances) / len(distances), rel=1e-9)


def test_gpg_gives_back_what_trajectories_without_a_signal_take() -> None:
    """Counted per stream over the whole step: of 6 fresh ones 5 have an advantage, of 3 replayed ones 2."""
    actor, old = tiny_actor(seed=0), tiny_actor(seed=1)
    scored = rescore(actor, ragged(), old=old)
    found = {}
    for name in ("gpg", "reinforce"):
        loss = {stream: {"objective": name} for stream in ("fresh", "replay")}
        found[name] = gradients(actor, scored, run_config(loss=loss, batch={"micro_batch_tokens": 1}))[2].metrics()
    for key, factor in (("actor/fresh/pg_loss", 6 / 5), ("actor/replay/pg_loss", 3 / 2)):
        assert found["gpg"][key] == pytest.approx(factor * found["reinforce"][key], rel=1e-12)


def test_importance_weighted_kl_of_tokens_nobody_is_known_to_have_sampled_takes_the_old_policy() -> None:
    actor, old, ref = (tiny_actor(seed=seed) for seed in range(3))
    rows = [row("demo", segment("uuxxx"), advantage=0.0, stream="replay"), row("own", segment("uull"), advantage=0.0)]
    scored = rescore(actor, rows, old=old, ref=ref)
    kl = {"loss_coef": 0.1, "loss_gradient": "importance"}
    found = []
    for replay in ({"missing_log_probs": "luffy"}, {"missing_log_probs": "recompute"}, {"anchor": "old"}):
        found.append(gradients(actor, scored, run_config(loss={"replay": replay}, kl=kl))[1])
    assert float(found[0].abs().max()) > 1e-4
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


def test_rejected_tokens_have_no_advantage_left_for_any_figure() -> None:
    actor = tiny_actor()
    known = rescore(actor, [row("a", segment("ulll", [-0.1, -30.0, -0.1]), advantage=2.0)], old=actor)
    rejection = {"kind": "rejection", "ratio_low": 1e-9, "ratio_high": 1e6}
    kept, metrics = corrected(known, run_config(loss={"fresh": {"correction": rejection}}).loss.parts())
    rejected = known.batch.loss_mask & ~kept.batch.loss_mask
    assert metrics["actor/fresh/rejected"] == pytest.approx(1 / 3) and int(rejected.sum()) == 1
    assert kept.batch.advantages[rejected].tolist() == [0.0]
    assert kept.batch.advantages[kept.batch.loss_mask].tolist() == [2.0, 2.0]
