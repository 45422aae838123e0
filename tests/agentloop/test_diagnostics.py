import math

import numpy as np
import pytest
import torch

from agentloop.algorithms.diagnostics import effective_sample_size, trajectory_drift
from agentloop.algorithms.log_probs import LOG_RATIO_BOUND
from context.authors import LLM
from context.tokens import Segment, TokenSequence
from replay.blobs import encode_log_probs
from replay.stats import ess
from tests.replay.fakes import AUTHORS


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


def test_what_a_stored_row_weighs_is_the_same_without_tensors() -> None:
    random = np.random.default_rng(0)
    behavior = random.normal(-1.0, 0.5, 6).astype(np.float32)
    behavior[:2] = np.nan
    scores = np.where(np.isnan(behavior), np.nan, behavior + random.normal(0.0, 15.0, 6)).astype(np.float32)
    drift = trajectory_drift(
        torch.tensor(scores)[None],
        torch.tensor(behavior)[None],
        response_mask=~torch.tensor(behavior).isnan()[None],
        trajectory=torch.tensor([0]),
        count=1,
    )
    codes = np.full(6, AUTHORS.code(LLM), np.uint8)
    tokens = TokenSequence(np.arange(6, dtype=np.int32), codes, behavior, np.zeros(6, np.int32))
    weight = ess.row_weight([Segment(tokens)], [encode_log_probs(scores)])
    assert weight == pytest.approx(float(drift.weight[0]), rel=1e-6)
    assert ess.LOG_RATIO_BOUND == LOG_RATIO_BOUND
    weights = [0.3, 1.0, 2.5]
    assert ess.effective_sample_size(np.array(weights)) == effective_sample_size(
        torch.tensor(weights, dtype=torch.float64)
    )
