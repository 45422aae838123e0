"""GAE and the critic's loss against their formulas in plain Python, and against hand-made numbers."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from agentloop.algorithms.gae import at_last_action_token, explained_variance, gae, value_loss, whiten_tokens


def ragged(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, response mask, trajectory, bootstrap: one to three rows a trajectory, action tokens anywhere."""
    rng = np.random.default_rng(seed)
    owners = [n for n in range(5) for _ in range(int(rng.integers(1, 4)))]
    shape = (len(owners), 11)
    mask = torch.from_numpy(rng.random(shape) < 0.5)
    mask[:, 0] = False
    mask[owners.index(3)] = False  # a row without an action token
    rewards, values = (torch.from_numpy(rng.normal(0, 10.0, shape)) for _ in range(2))
    return rewards, values, mask, torch.tensor(owners), torch.from_numpy(rng.normal(0, 10.0, 5))


def brute_force(
    rewards: Tensor, values: Tensor, mask: Tensor, owners: Tensor, last: Tensor, *, g: float, lam: float
) -> list[list[float]]:
    """A_k = sum_{l=0}^{K-1-k} (g lam)^l (r_{k+l} + g V_{k+l+1} - V_{k+l}), each sum anew."""
    result = [[0.0] * rewards.shape[1] for _ in range(len(owners))]
    for n in range(len(last)):
        cells = [(i, t) for i in range(len(owners)) if owners[i] == n for t in range(rewards.shape[1]) if mask[i, t]]
        r = [rewards[c].item() for c in cells]
        v = [values[c].item() for c in cells] + [last[n].item()]
        for k, (i, t) in enumerate(cells):
            result[i][t] = math.fsum(
                (g * lam) ** step * (r[k + step] + g * v[k + step + 1] - v[k + step]) for step in range(len(cells) - k)
            )
    return result


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.99, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("seed", range(4))
def test_gae_equals_the_written_sum(seed: int, gamma: float, gae_lambda: float) -> None:
    rewards, values, mask, owners, bootstrap = ragged(seed)
    discounts = {"gamma": gamma, "gae_lambda": gae_lambda}
    found = gae(rewards, values, bootstrap=bootstrap, response_mask=mask, trajectory=owners, **discounts)
    written = brute_force(rewards, values, mask, owners, bootstrap, g=gamma, lam=gae_lambda)
    torch.testing.assert_close(found, torch.tensor(written, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert not found[~mask].any()


def test_score_stands_at_the_last_action_token_over_all_rows() -> None:
    mask = torch.tensor([[False, True, True, False], [False, True, False, False], [False, False, False, False]])
    # Trajectory 0 has rows 0 and 1; trajectory 1 says nothing.
    rewards = at_last_action_token(torch.tensor([0.75, 0.5]), mask, torch.tensor([0, 0, 1]))
    assert rewards.tolist() == [[0.0] * 4, [0.0, 0.75, 0.0, 0.0], [0.0] * 4]


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        # Of the population, which is all but the last: mean 3, variance (4 + 0 + 4) / 2 = 4. Of all: mean 4.5,
        # variance (12.25 + 2.25 + 0.25 + 20.25) / 3 = 35 / 3, by which the last one's 6 is divided.
        ([1.0, 3.0, 5.0, 9.0], [-1.0, 0.0, 1.0, 6 / math.sqrt(35 / 3)]),
        # Mean 2/3, variance 1/3: zeros count. Of all: mean 1/2, variance 1/3.
        ([1.0, 1.0, 0.0, 0.0], [0.577350, 0.577350, -1.154701, -1.154701]),
        # One of N that is apart from all others is sqrt(N) away, equal or nearly equal as they are.
        ([0.3, 0.3, 0.3, 0.9], [0.0, 0.0, 0.0, 2.0]),
        ([0.0, 0.0, 0.0, 0.9], [0.0, 0.0, 0.0, 2.0]),
        ([0.0, 1e-7, -1e-7, 0.9], [0.0, 0.001, -0.001, 2.0]),
        ([0.3, 0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 0.0]),
        # Differences of rounding stay small: 0.333e-6 / sqrt(0.333e-12 + 1e-8).
        ([1.0, 1.0, 0.999999, 1.0], [0.003333, 0.003333, -0.006667, 0.003333]),
    ],
)
def test_whitening_measures_by_the_populations_mean_and_what_is_outside_by_the_deviation_of_all(
    advantages: list[float], expected: list[float]
) -> None:
    fresh = torch.tensor([[True, True, True, False]])
    found = whiten_tokens(torch.tensor([advantages], dtype=torch.float64), torch.ones_like(fresh), fresh)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)


def written_loss(v: float, old: float, r: float, clip: float | None) -> tuple[float, float]:
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
    losses, _ = value_loss(values, torch.tensor(old), torch.tensor(r), mask=mask, value_clip=clip)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    for i in range(200):
        loss, slope = written_loss(v[i], old[i], r[i], clip) if mask[i] else (0.0, 0.0)
        assert losses[i].item() == pytest.approx(loss, rel=1e-9)
        assert gradient[i].item() == pytest.approx(slope, rel=1e-9)


def test_value_loss_by_hand() -> None:
    values = torch.tensor([0.5, 1.0, 1.0], dtype=torch.float64)
    old = torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64)
    returns = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    losses, clipped = value_loss(values, old, returns, mask=torch.ones(3, dtype=torch.bool), value_clip=0.2)
    # 0.5 x 0.25; value 1 clipped to 0.2 misses 1 by 0.8: 0.5 x 0.64; it misses 0 by 1, more than the clipped 0.2 does.
    assert losses.tolist() == pytest.approx([0.125, 0.32, 0.5])
    assert clipped.tolist() == [False, True, False]


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
