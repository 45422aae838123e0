import math

import numpy as np
import pytest
import torch

from agentloop.algorithms.log_probs import LOG_RATIO_BOUND, log_ratios
from agentloop.learning.update_stats import Drift, trajectory_drift
from replay.questions.tokens import LOG_RATIO_BOUND as BOUND_WITHOUT_TENSORS


def test_drift_is_over_the_known_action_tokens_of_all_rows_of_a_trajectory() -> None:
    nan = math.nan
    old = torch.log(torch.tensor([[0.5, 0.2, 0.9], [0.4, 0.6, 0.9], [0.5, 0.5, 0.5]], dtype=torch.float64))
    behavior = torch.log(torch.tensor([[0.25, 0.4, 0.1], [0.1, nan, 0.1], [nan, nan, nan]], dtype=torch.float64))
    response = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    drift = trajectory_drift(old, behavior, response_mask=response, trajectory=torch.tensor([0, 0, 1]), count=2)
    # Ratios of trajectory 0: 2, 1/2 | 4; mean log = (ln 2 - ln 2 + ln 4) / 3
    assert drift.tokens.tolist() == [3, 0]
    assert drift.sum[0].item() == pytest.approx(6.5)
    assert drift.token_gap_max.tolist() == pytest.approx([math.log(4), 0.0])
    assert drift.weight[0].item() == pytest.approx(4 ** (1 / 3))
    assert drift.squares[0].item() == pytest.approx(20.25)
    # r - 1 - ln r: (1 - ln 2) + (-1/2 + ln 2) + (3 - ln 4)
    assert drift.kl_sum[0].item() == pytest.approx(3.5 - math.log(4))


def test_largest_gap_is_the_same_way_up_and_down_and_no_clamp_bounds_it() -> None:
    generator = np.random.default_rng(0)
    behavior, old = -generator.exponential(3.0, (2, 40, 9))
    behavior[3, 2] = old[3, 2] - 31.5
    behavior[5, 4], old[6, 1] = np.nan, -50.0
    trajectory, response = generator.integers(0, 12, 40), generator.random((40, 9)) < 0.7
    response[3, 2] = response[5, 4] = response[6, 1] = True
    found = trajectory_drift(
        *(torch.tensor(values, dtype=torch.float32) for values in (old, behavior)),
        response_mask=torch.tensor(response),
        trajectory=torch.tensor(trajectory),
        count=12,
    )
    gaps = np.where(response, np.abs(old - behavior), np.nan)
    wanted = [np.nanmax(gaps[trajectory == place], initial=0.0) for place in range(12)]
    assert max(wanted) > 31.0
    assert found.token_gap_max.tolist() == pytest.approx(wanted, abs=1e-5)
    # By hand, one token of two: log(0.5) - log(0.25) = 0.693, and -9.2 - (-0.2) = -9.
    by_hand = drifting([2.0, math.exp(-9.0)], [2.0])
    assert by_hand.token_gap_max.tolist() == pytest.approx([9.0, math.log(2.0)])


def drifting(*ratios: list[float]) -> Drift:
    """Trajectories of tokens with such ratios old / behavior."""
    rows = len(ratios)
    mask = torch.zeros((rows, max(map(len, ratios))), dtype=torch.bool)
    logs = torch.zeros(mask.shape, dtype=torch.float64)
    for row, values in enumerate(ratios):
        mask[row, : len(values)] = True
        logs[row, : len(values)] = torch.tensor(values, dtype=torch.float64).log()
    return trajectory_drift(
        logs - 30.0, torch.full_like(logs, -30.0), response_mask=mask, trajectory=torch.arange(rows), count=rows
    )


def test_effective_sample_size_is_over_tokens() -> None:
    drift = drifting([4.0, 0.25, 1.0, 1.0], [2.0, 2.0], [9.0])
    both = torch.tensor([True, True, False])
    # Six tokens: sum 4 + 0.25 + 1 + 1 + 2 + 2 = 10.25, squares 16 + 0.0625 + 1 + 1 + 4 + 4 = 26.0625.
    assert drift.effective_sample_size(both) == pytest.approx(10.25**2 / (6 * 26.0625))
    assert drift.effective_sample_size(torch.tensor([False, False, True])) == 1.0


def test_log_ratios_are_clamped_as_those_without_tensors_and_zero_outside_the_mask() -> None:
    assert BOUND_WITHOUT_TENSORS == LOG_RATIO_BOUND
    ratios = log_ratios(
        torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        torch.tensor([-1.5, -99.0, 99.0, math.nan]),
        torch.tensor([True, True, True, False]),
    )
    assert ratios.tolist() == [0.5, 20.0, -20.0, 0.0]
