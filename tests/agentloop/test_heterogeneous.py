import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from agentloop.algorithms.heterogeneous import ClipRange, anchor_log_probs, heterogeneous_loss

FRESH = ClipRange(0.2, 0.28, 3.0)
REPLAY = ClipRange(0.1, 0.6, None)


def reference(
    log_probs: npt.NDArray[np.float64],
    anchors: npt.NDArray[np.float64],
    advantages: npt.NDArray[np.float64],
    mask: npt.NDArray[np.bool_],
    replayed: npt.NDArray[np.bool_],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Loss and d loss / d log-prob of every token, by cases."""
    loss, gradient = np.zeros_like(log_probs), np.zeros_like(log_probs)
    for i, t in zip(*np.nonzero(mask), strict=True):
        clip = REPLAY if replayed[i] else FRESH
        difference, a = log_probs[i, t] - anchors[i, t], advantages[i, t]
        inside = -20 < difference < 20
        r = math.exp(min(20.0, max(-20.0, difference)))
        low, high = 1 - clip.clip_low, 1 + clip.clip_high
        if a >= 0:
            loss[i, t], moves = -a * min(r, high), r < high
        else:
            ceiling = math.inf if clip.dual_clip is None else clip.dual_clip
            loss[i, t], moves = -a * min(max(r, low), ceiling), low < r < ceiling
        gradient[i, t] = -a * r if moves and inside else 0.0
    return loss, gradient


def test_loss_and_gradient_equal_an_independent_reference() -> None:
    rng = np.random.default_rng(0)
    shape = (40, 25)
    log_probs = rng.uniform(-6, 0, shape)
    anchors = log_probs + rng.normal(0, 0.8, shape) * (rng.random(shape) < 0.7)
    anchors[0, 0] = log_probs[0, 0] - 95
    anchors[1, 0] = log_probs[1, 0] + 95
    advantages = np.repeat(rng.normal(0, 1, (40, 1)), 25, axis=1)
    mask, replayed = rng.random(shape) < 0.6, rng.random(40) < 0.5
    mask[:2, 0] = True
    anchors[~mask] = np.nan
    expected_loss, expected_gradient = reference(log_probs, anchors, advantages, mask, replayed)

    carried = torch.tensor(log_probs, requires_grad=True)
    result = heterogeneous_loss(
        carried,
        torch.tensor(anchors),
        advantages=torch.tensor(advantages),
        loss_mask=torch.tensor(mask),
        replay_mask=torch.tensor(replayed),
        fresh=FRESH,
        replay=REPLAY,
    )
    (gradient,) = torch.autograd.grad(result.policy.loss.sum(), carried)
    np.testing.assert_allclose(result.policy.loss.detach().numpy(), expected_loss, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(gradient.numpy(), expected_gradient, rtol=1e-12, atol=1e-14)
    assert np.count_nonzero(expected_gradient) > 100


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("difference", [95.0, -95.0, 800.0])
def test_log_prob_far_off_gives_finite_loss_and_gradient(difference: float, trained: bool, advantage: float) -> None:
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    result = heterogeneous_loss(
        log_probs,
        torch.tensor([[-1.0, -2.0 - difference]]),
        advantages=torch.full((1, 2), advantage),
        loss_mask=torch.tensor([[True, trained]]),
        replay_mask=torch.tensor([True]),
        fresh=FRESH,
        replay=REPLAY,
    )
    (gradient,) = torch.autograd.grad(result.policy.loss.sum(), log_probs)
    assert bool(result.policy.loss.isfinite().all())
    assert bool(gradient.isfinite().all())
    assert float(gradient[0, 0]) == -advantage


@pytest.mark.parametrize("name", ["advantages", "anchors"])
def test_loss_refuses_inputs_that_require_grad(name: str) -> None:
    inputs: dict[str, Any] = {"advantages": torch.ones(1, 2), "anchors": torch.zeros(1, 2)}
    inputs[name].requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"{name} must be detached"):
        heterogeneous_loss(
            torch.zeros(1, 2),
            inputs["anchors"],
            advantages=inputs["advantages"],
            loss_mask=mask,
            replay_mask=mask[:, 0],
            fresh=FRESH,
            replay=REPLAY,
        )


@pytest.mark.parametrize(
    ("fresh", "replay", "expected"),
    [("old", "behavior", [1.0, 4.0]), ("behavior", "old", [2.0, 3.0]), ("old", "old", [1.0, 3.0])],
)
def test_anchor_is_chosen_per_stream(fresh: Any, replay: Any, expected: list[float]) -> None:
    anchors = anchor_log_probs(
        torch.tensor([[1.0], [3.0]]),
        torch.tensor([[2.0], [4.0]]),
        replay_mask=torch.tensor([False, True]),
        fresh=fresh,
        replay=replay,
    )
    assert anchors[:, 0].tolist() == expected
