"""Four rows of three trajectories: A has two rows (2 and 1 trained tokens), B has one (3), C is fully masked.

Token losses: A 1, 2 | 4; B 8, 16, 32; C anything. So sum A = 7, sum B = 56.
"""

from typing import Any

import pytest
import torch

from agentloop.algorithms.heterogeneous import token_weights

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
def test_aggregation_equals_hand_computed_values(
    mode: str, norm_length: float | None, joint: float, per_stream: float
) -> None:
    """One denominator for both streams, or one each, and half the weight for the replayed one."""
    assert aggregate(mode=mode, norm_length=norm_length) == pytest.approx(joint, abs=1e-12)
    apart = aggregate(mode=mode, norm_length=norm_length, normalise="per_stream", replay_weight=0.5)
    assert apart == pytest.approx(per_stream, abs=1e-12)


@pytest.mark.parametrize("normalise", ["joint", "per_stream"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_aggregation_of_nothing_trained_is_zero(mode: str, normalise: str) -> None:
    assert aggregate(torch.zeros_like(MASK), mode=mode, norm_length=3.0, normalise=normalise) == 0.0


def test_aggregation_refuses_a_missing_norm_length() -> None:
    with pytest.raises(ValueError, match="norm_length must be"):
        aggregate(mode="seq-mean-token-sum-norm")
