"""Pairs of updates that must be equal."""

import math

import pytest
import torch
from torch import Tensor

from agentloop.algorithms.heterogeneous import Aggregation
from agentloop.learning.batch import build_batch
from tests.fakes.batch_rows import (
    AUTHORS,
    LOSS,
    aggregated_by,
    gradients,
    mixed_rows,
    row,
    run_config,
    sampled_by,
    scored_rows,
    segment,
    tiny_actor,
    trainer,
    weights_of,
)

MODES: list[Aggregation] = [
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("normalise", ["joint", "per_stream"])
@pytest.mark.parametrize("mode", MODES)
def test_gradient_of_one_pass_equals_that_of_one_row_at_a_time(
    dtype: torch.dtype, tolerance: float, mode: str, normalise: str
) -> None:
    actor, old = tiny_actor(dtype, seed=0), tiny_actor(dtype, seed=1)
    scored = scored_rows(actor, mixed_rows(), old=old)
    results: list[tuple[float, Tensor]] = []
    for micro_batch_tokens in (10**6, 1, 30):
        config = run_config(
            loss={**LOSS, **aggregated_by(mode), "normalise": normalise},
            batch={"micro_batch_tokens": micro_batch_tokens},
        )
        loss, gradient, _ = gradients(actor, scored, config)
        results.append((loss, gradient))
    whole_loss, whole = results[0]
    for loss, gradient in results[1:]:
        assert (gradient - whole).abs().max() <= tolerance * whole.abs().max()
        assert loss == pytest.approx(whole_loss, rel=tolerance)


def test_ratio_and_drift_of_unchanged_weights_are_one() -> None:
    actor = tiny_actor(torch.float32)
    rows = sampled_by(actor, mixed_rows())
    batch = build_batch(rows, AUTHORS)
    metrics = trainer(actor, run_config(batch={"mini_batch": 100})).update(rows, iteration=1).metrics
    for stream in ("fresh", "replay"):
        for name in ("drift_mean", "drift_max", "ess", "ratio_mean", "ratio_min", "ratio_max"):
            assert metrics[f"actor/{stream}/{name}"] == pytest.approx(1.0, abs=1e-4)
        assert metrics[f"actor/{stream}/pg_clipfrac"] == 0.0
    # Without drift the policy loss is minus the mean advantage of the stream's trained tokens.
    for stream, replayed in (("fresh", False), ("replay", True)):
        rows_of = batch.replay_mask == replayed
        mask = batch.loss_mask[rows_of]
        mean = batch.advantages[rows_of][mask].mean().item()
        assert metrics[f"actor/{stream}/pg_loss"] == pytest.approx(-mean, abs=1e-5)


def test_observing_leaves_the_update_bit_identical() -> None:
    results = []
    for observe in (False, True):
        actor = tiny_actor(torch.float32)
        learner = trainer(actor, run_config(batch={"mini_batch": 4}))
        for iteration in (1, 2, 3):
            if observe:
                random = torch.get_rng_state()
                observed = [row("o", segment("uudddd", seed=iteration), stream="replay")]
                assert learner.score_only(observed).metrics["actor/replay/drift_mean"] > 0
                assert torch.equal(torch.get_rng_state(), random)
            result = learner.update(mixed_rows(replayed=0), iteration=iteration)
        results.append((weights_of(actor), result.metrics, learner.state()[0]))
    (weights, metrics, state), (observed_weights, observed_metrics, observed_state) = results
    assert torch.equal(weights, observed_weights)
    assert metrics == observed_metrics
    assert all(torch.equal(state[name], observed_state[name]) for name in state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_trainer_equals_the_uninterrupted_one(dtype: torch.dtype) -> None:
    config = run_config(batch={"mini_batch": 4, "ppo_epochs": 2}, optimizer={"learning_rate": 0.01})
    actor = tiny_actor(dtype)
    learner = trainer(actor, config)
    for iteration in (1, 2):
        learner.update(mixed_rows(), iteration=iteration)
    tensors, values = learner.state()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    weights = {name: tensor.clone() for name, tensor in actor.model.state_dict().items()}
    last = learner.update(mixed_rows(), iteration=3)

    resumed_actor = tiny_actor(dtype, seed=5)
    resumed_actor.model.load_state_dict(weights)
    resumed = trainer(resumed_actor, config)
    resumed.load_state(saved, values)
    assert resumed.update(mixed_rows(), iteration=3).metrics == last.metrics
    assert torch.equal(weights_of(resumed_actor), weights_of(actor))


def test_same_rows_give_the_same_update_twice() -> None:
    twins = []
    for _ in range(2):
        actor = tiny_actor(torch.float32)
        result = trainer(actor, run_config(batch={"mini_batch": 3})).update(mixed_rows(), iteration=4)
        twins.append((weights_of(actor), result))
    assert torch.equal(twins[0][0], twins[1][0])
    assert twins[0][1] == twins[1][1]
    assert all(math.isfinite(value) for value in twins[0][1].metrics.values())
