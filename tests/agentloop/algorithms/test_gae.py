"""GAE against the sum it is defined by, written out trajectory by trajectory in plain Python."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from agentloop.algorithms.gae import at_last_action_token, gae, whitened


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
        cells = [
            (i, t) for i in range(len(owners)) if owners[i] == n for t in range(rewards.shape[1]) if bool(mask[i, t])
        ]
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
    found = gae(
        rewards, values, response_mask=mask, trajectory=owners, bootstrap=bootstrap, gamma=gamma, gae_lambda=gae_lambda
    )
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
    found = whitened(torch.tensor([advantages], dtype=torch.float64), torch.ones_like(fresh), fresh)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)
