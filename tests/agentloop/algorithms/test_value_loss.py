"""The critic's loss against its formula in plain Python, and against hand-made numbers."""

import math

import numpy as np
import pytest
import torch

from agentloop.algorithms.value_loss import explained_variance, value_loss


def written(v: float, old: float, r: float, clip: float | None) -> tuple[float, float]:
    """Value and derivative by v of 0.5 max((v - r)^2, (clip(v) - r)^2)."""
    plain = (v - r) ** 2
    if clip is None:
        return 0.5 * plain, v - r
    near = min(max(v, old - clip), old + clip)
    bounded = (near - r) ** 2
    if plain >= bounded:
        return 0.5 * plain, v - r
    return 0.5 * bounded, (near - r) if old - clip < v < old + clip else 0.0


@pytest.mark.parametrize("clip", [None, 0.2, 5.0])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_value_loss_and_gradient_equal_the_written_formula(clip: float | None, scale: float) -> None:
    rng = np.random.default_rng(3)
    v, old, r = (rng.normal(0, scale, 200) for _ in range(3))
    old[::2] = v[::2] + rng.normal(0, 0.1, 100)  # half of them hardly moved
    mask = torch.from_numpy(rng.random(200) < 0.7)
    old[~mask], r[~mask] = math.inf, math.nan  # whatever stands there
    values = torch.tensor(v, requires_grad=True)
    result = value_loss(values, torch.tensor(old), torch.tensor(r), mask=mask, value_clip=clip)
    (gradient,) = torch.autograd.grad(result.loss.sum(), values)
    for i in range(200):
        loss, slope = written(v[i], old[i], r[i], clip) if mask[i] else (0.0, 0.0)
        assert result.loss[i].item() == pytest.approx(loss, rel=1e-9)
        assert gradient[i].item() == pytest.approx(slope, rel=1e-9)


def test_value_loss_by_hand() -> None:
    values = torch.tensor([0.5, 1.0, 1.0], dtype=torch.float64)
    old = torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64)
    returns = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    result = value_loss(values, old, returns, mask=torch.ones(3, dtype=torch.bool), value_clip=0.2)
    # 0.5 x 0.25; value 1 clipped to 0.2 misses 1 by 0.8: 0.5 x 0.64; it misses 0 by 1, more than the clipped 0.2 does.
    assert result.loss.tolist() == pytest.approx([0.125, 0.32, 0.5])
    assert result.clipped.tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["old_values", "returns"])
def test_value_loss_refuses_targets_with_a_gradient(name: str) -> None:
    tensors = {"old_values": torch.zeros(1), "returns": torch.zeros(1)}
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} must be detached"):
        value_loss(torch.zeros(1), **tensors, mask=torch.tensor([True]), value_clip=None)


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((3,), 5.0), returns) == pytest.approx(0.0)
    # Errors 0, 0, 2 have variance 8/9, returns 2/3: 1 - 4/3.
    assert explained_variance(torch.tensor([0.0, 1.0, 0.0]), returns) == pytest.approx(-1 / 3)
    assert explained_variance(returns, torch.ones(3)) is None
