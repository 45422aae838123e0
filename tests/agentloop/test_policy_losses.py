import math

import pytest
import torch

from agentloop.algorithms.policy_losses import ppo_clip


def one_token(ratio: float, advantage: float, dual_clip: float = math.inf) -> tuple[float, float, bool, bool]:
    """Loss, d loss / d ratio, and the two flags, with clip range 0.8 .. 1.28."""
    r = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
    bounds = (torch.tensor(bound, dtype=torch.float64) for bound in (0.2, 0.28, dual_clip))
    low, high, dual = bounds
    result = ppo_clip(r, torch.tensor(advantage, dtype=torch.float64), clip_low=low, clip_high=high, dual_clip=dual)
    (gradient,) = torch.autograd.grad(result.loss, r)
    return result.loss.item(), gradient.item(), bool(result.clipped), bool(result.clipped_lower)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected"),
    [
        (1.0, 2.0, 3.0, (-2.0, -2.0, False, False)),
        (1.5, 1.0, 3.0, (-1.28, 0.0, True, False)),  # clipped above
        (0.5, 1.0, 3.0, (-0.5, -1.0, False, False)),  # a good token may always rise
        (0.5, -1.0, 3.0, (0.8, 0.0, True, False)),  # clipped below
        (1.5, -1.0, 3.0, (1.5, 1.0, False, False)),  # a bad token may always fall ...
        (5.0, -1.0, 3.0, (3.0, 0.0, False, True)),  # ... up to the dual clip
        (5.0, -1.0, math.inf, (5.0, 1.0, False, False)),
        (5.0, 1.0, 3.0, (-1.28, 0.0, True, False)),  # the dual clip never touches A > 0
        (0.1, 1.0, 3.0, (-0.1, -1.0, False, False)),
        (5.0, 0.0, 3.0, (0.0, 0.0, False, False)),
        (5.0, 0.0, math.inf, (0.0, 0.0, False, False)),
    ],
)
def test_ppo_clip_equals_hand_computed_values(
    ratio: float, advantage: float, dual_clip: float, expected: tuple[float, float, bool, bool]
) -> None:
    loss, gradient, clipped, clipped_lower = one_token(ratio, advantage, dual_clip)
    assert (clipped, clipped_lower) == expected[2:]
    assert loss == pytest.approx(expected[0], abs=1e-12)
    assert gradient == pytest.approx(expected[1], abs=1e-12)


def test_ppo_clip_lets_rows_have_their_own_bounds() -> None:
    ratios = torch.full((2, 1), 1.5)
    high = torch.tensor([[0.2], [0.6]])
    result = ppo_clip(ratios, torch.ones(2, 1), clip_low=high, clip_high=high, dual_clip=torch.tensor(3.0))
    torch.testing.assert_close(result.loss, torch.tensor([[-1.2], [-1.5]]))
