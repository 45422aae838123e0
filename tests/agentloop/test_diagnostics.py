import math

import pytest
import torch

from agentloop.algorithms.diagnostics import effective_sample_size, trajectory_drift


def test_effective_sample_size_equals_hand_computed_values() -> None:
    assert effective_sample_size(torch.tensor([2.0, 2.0, 2.0])) == pytest.approx(1.0)
    # (1 + 3)^2 / (2 (1 + 9)) = 0.8
    assert effective_sample_size(torch.tensor([1.0, 3.0])) == pytest.approx(0.8)
    assert effective_sample_size(torch.tensor([1e8, 1.0, 1.0, 1.0])) == pytest.approx(0.25, abs=1e-6)


def test_drift_is_over_the_known_action_tokens_of_all_rows_of_a_trajectory() -> None:
    nan = math.nan
    old = torch.log(torch.tensor([[0.5, 0.2, 0.9], [0.4, 0.6, 0.9], [0.5, 0.5, 0.5]], dtype=torch.float64))
    behavior = torch.log(torch.tensor([[0.25, 0.4, 0.1], [0.1, nan, 0.1], [nan, nan, nan]], dtype=torch.float64))
    response = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    drift = trajectory_drift(old, behavior, response_mask=response, trajectory=torch.tensor([0, 0, 1]), count=2)
    # Ratios of trajectory 0: 2, 1/2 | 4; mean log = (ln 2 - ln 2 + ln 4) / 3
    assert drift.tokens.tolist() == [3, 0]
    assert drift.sum[0].item() == pytest.approx(6.5)
    assert drift.max[0].item() == pytest.approx(4.0)
    assert drift.weight[0].item() == pytest.approx(4 ** (1 / 3))
    # r - 1 - ln r: (1 - ln 2) + (-1/2 + ln 2) + (3 - ln 4)
    assert drift.kl_sum[0].item() == pytest.approx(3.5 - math.log(4))
