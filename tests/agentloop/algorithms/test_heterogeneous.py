from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from agentloop.algorithms.catalog import OBJECTIVES
from agentloop.algorithms.heterogeneous import StreamLoss, anchor_log_probs, heterogeneous_loss, token_weights
from agentloop.algorithms.objective_input import TokenLoss
from tests.agentloop.algorithms.written_objectives import random_rows, written


def objective(name: str, **options: Any) -> TokenLoss:
    return partial(OBJECTIVES[name].function, **options)


FRESH: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
REPLAY: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.6, "dual_clip": None}
EVERY_ROW = torch.ones(40, dtype=torch.bool)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("fresh", "replay"),
    [
        (("ppo_clip", FRESH), ("ppo_clip", REPLAY)),
        (("ppo_clip", FRESH), ("exgrpo", {"beta": 0.1})),
        (("gspo", {"clip_low": 0.3, "clip_high": 0.3}), ("topr", {"ratio_high": 1.0})),
    ],
)
def test_each_stream_has_the_loss_and_gradient_of_its_own_objective(
    fresh: tuple[str, dict[str, Any]], replay: tuple[str, dict[str, Any]], weighted: bool
) -> None:
    rows = random_rows(0)
    replayed = rows.trajectory % 2 == 1
    scale = np.random.default_rng(1).uniform(0, 2, rows.mask.shape) if weighted else np.ones(rows.mask.shape)
    expected = [np.zeros(rows.mask.shape), np.zeros(rows.mask.shape)]
    for (name, options), own in ((fresh, ~replayed), (replay, replayed)):
        for one, by in zip(expected, written(name, replace(rows, mask=rows.mask & own[:, None]), options), strict=True):
            one += by * scale
    carried = torch.tensor(rows.log_probs, requires_grad=True)
    result = heterogeneous_loss(
        rows.inputs(carried),
        [
            (torch.tensor(own), StreamLoss(objective(name, **options)))
            for (name, options), own in ((fresh, ~replayed), (replay, replayed))
        ],
        importance_weights=torch.tensor(np.where(rows.mask, scale, np.nan)) if weighted else None,
    )
    (gradient,) = torch.autograd.grad(result.loss.sum(), carried)
    np.testing.assert_allclose(result.loss.detach().numpy(), expected[0], rtol=1e-6, atol=1e-14)
    np.testing.assert_allclose(gradient.numpy(), expected[1], rtol=1e-6, atol=1e-14)
    assert np.count_nonzero(expected[1]) > 50


@pytest.mark.parametrize(("name", "options"), [("luffy", {"gamma": 0.1}), ("bc", {"coef": 2, "weighting": "uniform"})])
def test_tokens_of_unknown_behavior_get_the_objective_for_missing_log_probs(name: str, options: Any) -> None:
    """The others' trajectory ratio is over the known ones alone."""
    rows = random_rows(2)
    unknown = np.random.default_rng(3).random(rows.mask.shape) < 0.3
    rows = replace(rows, behavior=np.where(unknown, np.nan, rows.anchors))
    gspo = {"clip_low": 0.9, "clip_high": 9.0}
    parts = (
        written("gspo", replace(rows, mask=rows.mask & ~unknown), gspo),
        written(name, replace(rows, mask=rows.mask & unknown), options),
    )
    carried = torch.tensor(rows.log_probs, requires_grad=True)
    stream = StreamLoss(objective("gspo", **gspo), missing=objective(name, **options))
    result = heterogeneous_loss(rows.inputs(carried), [(EVERY_ROW, stream)])
    (gradient,) = torch.autograd.grad(result.loss.sum(), carried)
    np.testing.assert_allclose(result.loss.detach().numpy(), parts[0][0] + parts[1][0], rtol=1e-6, atol=1e-14)
    np.testing.assert_allclose(gradient.numpy(), parts[0][1] + parts[1][1], rtol=1e-6, atol=1e-14)


def test_importance_weights_that_require_grad_raise() -> None:
    rows, stream = random_rows(0), StreamLoss(objective("surrogate"))
    weights = torch.ones(rows.mask.shape, requires_grad=True)
    inputs = rows.inputs(torch.tensor(rows.log_probs))
    with pytest.raises(ValueError, match="importance_weights must be detached"):
        heterogeneous_loss(inputs, [(EVERY_ROW, stream)], importance_weights=weights)


def test_anchor_is_chosen_by_the_kind_of_row_and_old_log_probs_stand_in_for_unknown_ones() -> None:
    """A row of an old anchor, one of the stored log-probs, and one of those that nobody knows."""
    behavior = torch.tensor([False, True, True])
    anchors = anchor_log_probs(
        torch.tensor([[1.0], [3.0], [5.0]]),
        torch.tensor([[2.0], [4.0], [float("nan")]]),
        [(~behavior, StreamLoss(objective("surrogate"))), (behavior, StreamLoss(objective("surrogate"), "behavior"))],
    )
    assert anchors[:, 0].tolist() == [1.0, 4.0, 5.0]


# Aggregation of four rows of three trajectories: A has two rows (2 and 1 trained tokens), B has one (3), C is fully
# masked. Token losses: A 1, 2 | 4; B 8, 16, 32; C anything. So sum A = 7, sum B = 56.

LOSSES = torch.tensor([[0, 1, 2, 99], [0, 99, 4, 99], [0, 8, 16, 32], [0, 5, 5, 5]], dtype=torch.float64)
MASK = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
TRAJECTORY = torch.tensor([0, 0, 1, 2])
B_REPLAYED = torch.tensor([False, False, True, False])


def aggregate(mask: torch.Tensor = MASK, **changes: Any) -> float:
    settings: dict[str, Any] = {
        "replay_mask": B_REPLAYED,
        "mode": "token-mean",
        "norm_length": None,
        "normalise": "joint",
        "replay_weight": 1.0,
    }
    weights = token_weights(mask, TRAJECTORY, **settings | changes)
    assert weights.shape == mask.shape
    assert bool((weights[~mask] == 0).all())
    return float((LOSSES * weights).sum())


@pytest.mark.parametrize(
    ("mode", "norm_length", "joint", "per_stream"),
    [
        ("token-mean", None, 63 / 6, 7 / 3 + 0.5 * 56 / 3),
        ("seq-mean-token-sum", None, (7 + 56) / 2, 7 + 0.5 * 56),
        ("seq-mean-token-mean", None, (7 / 3 + 56 / 3) / 2, 7 / 3 + 0.5 * 56 / 3),
        ("seq-mean-token-sum-norm", 10.0, (7 + 56) / 2 / 10, 0.7 + 0.5 * 5.6),
    ],
)
def test_aggregation_equals_hand_values(mode: str, norm_length: float | None, joint: float, per_stream: float) -> None:
    """One denominator for both streams, or one each, and half the weight for the replayed one."""
    assert aggregate(mode=mode, norm_length=norm_length) == pytest.approx(joint, abs=1e-12)
    apart = aggregate(mode=mode, norm_length=norm_length, normalise="per_stream", replay_weight=0.5)
    assert apart == pytest.approx(per_stream, abs=1e-12)


@pytest.mark.parametrize("normalise", ["joint", "per_stream"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_aggregation_of_nothing_trained_is_zero(mode: str, normalise: str) -> None:
    assert aggregate(torch.zeros_like(MASK), mode=mode, norm_length=3.0, normalise=normalise) == 0.0
