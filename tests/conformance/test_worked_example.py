"""Six response tokens whose every quantity is known to four digits, from rewards to the loss."""

import pytest
import torch

from agentloop.algorithms.gae import gae
from agentloop.algorithms.heterogeneous import token_weights
from agentloop.algorithms.kl import kl_estimate, kl_penalised_rewards
from agentloop.algorithms.objectives import ObjectiveInput, ppo_clip

OLD = torch.tensor([[-0.12, -0.08, -0.15, -0.10, -0.05, -0.02]], dtype=torch.float64)
REF = torch.tensor([[-0.15, -0.10, -0.18, -0.12, -0.08, -0.03]], dtype=torch.float64)
SCORES = torch.tensor([[0.0, 0, 0, 0, 0, 1]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[0.13, 0.10, 0.08, 0.05, 0.03, 0.05]], dtype=torch.float64)  # given, not derived
VALUES = torch.tensor([[0.82, 0.85, 0.88, 0.90, 0.92, 0.95]], dtype=torch.float64)
MASK = torch.ones(1, 6, dtype=torch.bool)


def test_kl_per_token_is_old_minus_reference() -> None:
    assert kl_estimate(OLD, REF, MASK, "k1")[0].tolist() == pytest.approx(
        [0.03, 0.02, 0.03, 0.02, 0.03, 0.01], abs=1e-12
    )


def test_rewards_are_the_score_less_the_kl_penalty() -> None:
    rewards = kl_penalised_rewards(SCORES, kl_estimate(OLD, REF, MASK, "k1"), 0.01)
    expected = [-0.0003, -0.0002, -0.0003, -0.0002, -0.0003, 0.9999]
    assert rewards[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_unchanged_weights_make_every_surrogate_term_its_advantage() -> None:
    log_probs = OLD.clone().requires_grad_()
    inputs = ObjectiveInput(
        log_probs=log_probs,
        anchors=OLD,
        behavior_log_probs=OLD,
        advantages=ADVANTAGES,
        loss_mask=MASK,
        trajectory=torch.tensor([0]),
        num_trajectories=1,
        signal_share=torch.ones(1),
    )
    result = ppo_clip(inputs, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert (-result.loss)[0].tolist() == ADVANTAGES[0].tolist()
    weights = token_weights(
        MASK,
        torch.tensor([0]),
        replay_mask=torch.tensor([False]),
        mode="token-mean",
        norm_length=None,
        normalise="joint",
        replay_weight=1.0,
    )
    pg_loss = (result.loss * weights).sum()
    assert pg_loss.item() == pytest.approx(-0.44 / 6, abs=1e-12)
    assert round(pg_loss.item(), 4) == -0.0733
    # d pg_loss / d log-prob = -A / 6 at ratio 1
    (gradient,) = torch.autograd.grad(pg_loss, log_probs)
    torch.testing.assert_close(gradient, -ADVANTAGES / 6)


def test_advantages_by_gae_from_the_rewards_and_values() -> None:
    rewards = kl_penalised_rewards(SCORES, kl_estimate(OLD, REF, MASK, "k1"), 0.01)
    advantages = gae(
        rewards,
        VALUES,
        response_mask=MASK,
        trajectory=torch.tensor([0]),
        bootstrap=torch.zeros(1, dtype=torch.float64),
        gamma=1.0,
        gae_lambda=0.95,
    )
    # Deltas r + V' - V: -0.0003 + 0.85 - 0.82, -0.0002 + 0.88 - 0.85, -0.0003 + 0.90 - 0.88, -0.0002 + 0.92 - 0.90,
    # -0.0003 + 0.95 - 0.92, 0.9999 + 0 - 0.95.
    deltas = [0.0297, 0.0298, 0.0197, 0.0198, 0.0297, 0.0499]
    expected = [sum(0.95**step * delta for step, delta in enumerate(deltas[k:])) for k in range(6)]
    assert advantages[0].tolist() == pytest.approx(expected, abs=1e-12)
    # The last two by hand: 0.0297 + 0.95 x 0.0499, and 0.0499 itself.
    assert expected[4:] == pytest.approx([0.077105, 0.0499])
