import math

import pytest
import torch

from agentloop.algorithms.log_probs import entropies, log_softmax, predictions


def test_prediction_of_token_t_uses_logits_at_t_minus_1_and_the_first_has_none() -> None:
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)
    wanted = predictions(mask)
    assert wanted.rows.tolist() == [0, 0, 1, 1]
    assert wanted.tokens.tolist() == [1, 3, 2, 3]
    assert wanted.sources.tolist() == [0, 2, 1, 2]
    assert wanted.columns.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="response_mask must be False at position 0"):
        predictions(torch.tensor([[False, True], [True, False]]))


def test_log_softmax_divides_logits_by_the_temperature_of_the_row_and_is_no_half_precision() -> None:
    logits = torch.tensor([[0.0, math.log(4)], [0.0, math.log(4)]], dtype=torch.float64)
    scores = log_softmax(logits, torch.tensor([1.0, 2.0]))
    # odds 4 : 1, and at temperature 2 their root: 2 : 1
    assert scores.exp().flatten().tolist() == pytest.approx([1 / 5, 4 / 5, 1 / 3, 2 / 3], abs=1e-12)
    assert log_softmax(torch.zeros(1, 2, dtype=torch.bfloat16), torch.ones(1)).dtype == torch.float32


def test_entropy_of_uniform_and_certain_distributions() -> None:
    scores = torch.log_softmax(torch.tensor([[0.0] * 8, [0.0] + [-math.inf] * 7]), dim=-1)
    assert entropies(scores).tolist() == pytest.approx([math.log(8), 0.0], abs=1e-6)
