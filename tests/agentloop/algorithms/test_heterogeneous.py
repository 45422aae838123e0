from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from agentloop.algorithms.catalog import OBJECTIVES
from agentloop.algorithms.heterogeneous import (
    Aggregation,
    Normalise,
    StreamLoss,
    anchor_log_probs,
    heterogeneous_loss,
    token_weights,
)
from agentloop.algorithms.objective_input import TokenLoss
from tests.agentloop.algorithms.written_objectives import random_rows, written


def objective(name: str, **options: Any) -> TokenLoss:
    return partial(OBJECTIVES[name].function, **options)


EVERY_ROW = torch.ones(40, dtype=torch.bool)


@pytest.mark.parametrize(("name", "options"), [("luffy", {"gamma": 0.1}), ("bc", {"coef": 2, "weighting": "uniform"})])
def test_tokens_of_unknown_behavior_get_the_objective_for_missing_log_probs(name: str, options: Any) -> None:
    """The others' trajectory ratio is over the known ones alone; the importance weights of both count in the mask."""
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
    weights = np.where(rows.mask, np.random.default_rng(4).uniform(0, 2, rows.mask.shape), np.nan)
    result = heterogeneous_loss(rows.inputs(carried), [(EVERY_ROW, stream)], importance_weights=torch.tensor(weights))
    (gradient,) = torch.autograd.grad(result.loss.sum(), carried)
    expected = [(one + other) * np.nan_to_num(weights) for one, other in zip(*parts, strict=True)]
    np.testing.assert_allclose(result.loss.detach().numpy(), expected[0], rtol=1e-6, atol=1e-14)
    np.testing.assert_allclose(gradient.numpy(), expected[1], rtol=1e-6, atol=1e-14)


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


@pytest.mark.parametrize("normalise", ["joint", "per_stream"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_trajectory_of_which_nothing_is_trained_is_in_no_denominator(mode: Aggregation, normalise: Normalise) -> None:
    settings: dict[str, Any] = {"mode": mode, "norm_length": 3.0, "normalise": normalise, "replay_weight": 1.0}
    mask, replayed = torch.tensor([[True, True], [False, True], [False, False]]), torch.tensor([False, True, False])
    without, both, alone = (
        token_weights(mask[rows], torch.arange(3)[rows], replay_mask=replayed[rows], **settings)
        for rows in (slice(2), slice(3), slice(2, 3))
    )
    assert (both[:2] == without).all()
    assert (both[2] == 0).all() and (alone == 0).all()
