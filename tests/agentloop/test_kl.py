import math

import pytest
import torch

from agentloop.algorithms.kl import k1, k3, kl_penalised_rewards


def test_k1_is_the_difference_in_nats() -> None:
    torch.testing.assert_close(k1(torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -1.0])), torch.tensor([0.5, -2.0]))


def test_k3_equals_hand_computed_values_and_ignores_masked_tokens() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-2.0, -2.0, -0.5, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    value = k3(log_probs, ref, mask)
    # d = ref - log_prob = -1, 0, 0.5: e^-1 + 1 - 1, 0, e^0.5 - 0.5 - 1
    assert value[0].tolist() == pytest.approx([math.exp(-1), 0.0, math.exp(0.5) - 1.5, 0.0], abs=1e-12)
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    # d k3 / d log_prob = 1 - e^d
    assert gradient[0].tolist() == pytest.approx([1 - math.exp(-1), 0.0, 1 - math.exp(0.5), 0.0], abs=1e-12)


def test_rewards_are_scores_less_the_penalty() -> None:
    rewards = kl_penalised_rewards(torch.tensor([0.0, 1.0]), torch.tensor([0.5, -0.5]), 0.1)
    torch.testing.assert_close(rewards, torch.tensor([-0.05, 1.05]))
