import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agentloop.algorithms.catalog import OBJECTIVES
from agentloop.algorithms.objective_input import PolicyLoss
from agentloop.config.sections.loss import StreamLossSection
from tests.agentloop.algorithms.written_objectives import Array, Rows, random_rows, written

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ppo_clip": [
        {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
        {"clip_low": 0.1, "clip_high": 0.6, "dual_clip": None},
    ],
    "gspo": [{"clip_low": 3e-4, "clip_high": 4e-4}, {"clip_low": 0.9, "clip_high": 30.0}],
    "cispo": [{"ratio_low": 0.0, "ratio_high": 5.0}, {"ratio_low": 0.8, "ratio_high": 1.28}],
    "sapo": [{"tau_positive": 1.0, "tau_negative": 1.05}, {"tau_positive": 0.3, "tau_negative": 4.0}],
    "gmpo": [{"log_ratio_low": 0.4, "log_ratio_high": 0.3}, {"log_ratio_low": 9.0, "log_ratio_high": 25.0}],
    "dppo_tv": [{"divergence_low": 0.15, "divergence_high": 0.05, "ratio_high": 20.0}],
    "dppo_kl": [
        {"divergence_low": 0.05, "divergence_high": 0.02, "ratio_high": 20.0},
        {"divergence_low": 1.5, "divergence_high": 0.8, "ratio_high": 3.0},
    ],
    "topr": [{"ratio_high": 1.0}, {"ratio_high": 7.0}],
    "exgrpo": [{"beta": 0.1}, {"beta": 3.0}],
    "luffy": [{"gamma": 0.1}],
    "bc": [{"coef": 0.5, "weighting": "uniform"}, {"coef": 1.0, "weighting": "advantage"}],
}
CASES = [(name, options) for name in OBJECTIVES for options in OPTIONS.get(name, [{}])]


def evaluated(name: str, rows: Rows, options: dict[str, Any]) -> tuple[PolicyLoss, Array]:
    log_probs = torch.tensor(rows.log_probs, requires_grad=True)
    result = OBJECTIVES[name].function(rows.inputs(log_probs), **options)
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    return result, gradient.numpy()


def test_configuration_has_the_options_of_every_objective() -> None:
    for name in OBJECTIVES:
        section = StreamLossSection.model_validate({"objective": name})
        assert set(section.objective.model_dump()) == {"name", *OPTIONS.get(name, [{}])[0]}


@pytest.mark.parametrize("equal_advantages", [True, False])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_objective_and_gradient_equal_the_formula(name: str, options: dict[str, Any], equal_advantages: bool) -> None:
    for seed in range(3):
        rows = random_rows(seed, equal_advantages=equal_advantages)
        result, gradient = evaluated(name, rows, options)
        expected_loss, expected = written(name, rows, options)
        np.testing.assert_allclose(result.loss.detach().numpy(), expected_loss, rtol=1e-6, atol=1e-14)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-14)
        assert np.count_nonzero(expected) > 20
        assert np.isfinite(expected_loss).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_masked_tokens_have_zero_loss_and_gradient(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Whatever stands there: NaN, infinity, a log-prob 95 nats off; in log-probs too."""
    rows = random_rows(5)
    wild = np.random.default_rng(0).choice([np.nan, np.inf, -np.inf, -95.0, 95.0], rows.log_probs.shape)
    log_probs = torch.tensor(np.where(rows.mask, rows.log_probs, wild), dtype=dtype, requires_grad=True)
    result = OBJECTIVES[name].function(rows.inputs(log_probs), **options)
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    masked = torch.tensor(~rows.mask)
    assert bool((result.loss[masked] == 0).all())
    assert bool((gradient[masked] == 0).all())
    assert not bool((result.clipped | result.clipped_lower)[masked].any())
    assert bool(result.loss.isfinite().all())
    assert bool(gradient.isfinite().all())
    assert bool(gradient.any())


@pytest.mark.parametrize("field", ["anchors", "behavior_log_probs", "advantages", "signal_share"])
def test_input_that_requires_grad_and_must_not_raises(field: str) -> None:
    inputs = random_rows(0).inputs(torch.zeros(40, 17))
    with pytest.raises(ValueError, match=f"{field} must be detached, got a tensor that requires grad"):
        replace(inputs, **{field: getattr(inputs, field).clone().requires_grad_()})


def one_token(now: float, anchor: float, advantage: float) -> Rows:
    return Rows(np.array([[now]]), np.array([[anchor]]), np.array([[advantage]]), np.array([[True]]), np.array([0]))


LN2 = math.log(2)
E3, S3 = math.exp(-3), 1 + math.exp(-3)
NEAR = {"divergence_low": 0.15, "divergence_high": 0.15, "ratio_high": 20.0}
NEARER = {"divergence_low": 0.05, "divergence_high": 0.05, "ratio_high": 20.0}


@pytest.mark.parametrize(
    ("name", "log_prob", "anchor", "advantage", "options", "expected"),
    [
        ("reinforce", -2.0, 0.0, 1.5, {}, (3.0, -1.5)),  # -1.5 x -2
        ("surrogate", -1.0, -1.0 - LN2, 3.0, {}, (-6.0, -6.0)),  # r = 2
        ("surrogate", -1.0, -1.0 - LN2, -3.0, {}, (6.0, 6.0)),  # no clip, no ceiling
        ("surrogate", -1.0, -31.0, 1.0, {}, (-math.exp(20), 0.0)),  # 30 nats are taken for 20
        ("gpg", -2.0, 0.0, 1.5, {}, (4.0, -2.0)),  # / 0.75, the share of trajectories with a signal
        ("cispo", -1.0, -1.0 - LN2, 1.0, {"ratio_low": 0, "ratio_high": 5}, (2.0, -2.0)),  # -2 x 1 x -1
        ("cispo", -1.0, -1.0 - 3 * LN2, 1.0, {"ratio_low": 0, "ratio_high": 5}, (5.0, -5.0)),  # r = 8: 5, and moves
        ("cispo", -1.0, -1.0 + LN2, -1.0, {"ratio_low": 0.8, "ratio_high": 5}, (-0.8, 0.8)),  # r = 0.5: 0.8
        ("sapo", -1.0, -1.0 - 2 * LN2, 1.0, {"tau_positive": 1, "tau_negative": 1}, (-4 / S3, -16 * E3 / S3**2)),
        # Probabilities 0.3 -> 0.5: risen by 0.2; 0.3 log(0.3 / 0.5) + 0.7 log(0.7 / 0.5) = 0.082. Good: no further.
        ("dppo_tv", math.log(0.5), math.log(0.3), 1.0, NEAR, (0.0, 0.0)),
        ("dppo_kl", math.log(0.5), math.log(0.3), 1.0, NEARER, (0.0, 0.0)),
        ("dppo_tv", math.log(0.5), math.log(0.3), -1.0, NEAR, (5 / 3 * math.log(0.5), 5 / 3)),  # bad: always
        ("dppo_kl", math.log(0.5), math.log(0.3), -1.0, NEARER, (5 / 3 * math.log(0.5), 5 / 3)),
        # 0.001 -> 0.06: by 0.059; divergence 0.0567.
        ("dppo_tv", math.log(0.06), math.log(0.001), 1.0, NEAR, (-20 * math.log(0.06), -20.0)),  # r = 60, at most 20
        ("dppo_kl", math.log(0.06), math.log(0.001), 1.0, NEARER, (0.0, 0.0)),
        ("luffy", math.log(0.1), math.nan, 1.0, {"gamma": 0.1}, (-0.5, -0.25)),  # 0.1 / 0.2; 0.01 / 0.04
        ("luffy", 0.0, math.nan, -2.0, {"gamma": 0.25}, (1.6, 0.32)),  # 2 / 1.25; 2 x 0.25 / 1.5625
        ("exgrpo", -1.0, -1.0, 1.0, {"beta": 0.1}, (-1 / 1.1, -0.1 / 1.21)),  # 12 times weaker than -1
        ("exgrpo", -1.0 + math.log(0.1), -1.0, 1.0, {"beta": 0.1}, (-0.5, -0.25)),  # the most: at w = beta
        ("exgrpo", -1.0 + math.log(10), -1.0, 1.0, {"beta": 0.1}, (-10 / 10.1, -1 / 102.01)),  # limits itself
        ("bc", -2.0, 0.0, -1.0, {"coef": 0.5, "weighting": "uniform"}, (1.0, -0.5)),  # whatever the advantage
        ("bc", -2.0, 0.0, 3.0, {"coef": 0.5, "weighting": "advantage"}, (3.0, -1.5)),
        ("bc", -2.0, 0.0, -1.0, {"coef": 0.5, "weighting": "advantage"}, (0.0, 0.0)),  # failures are not imitated
    ],
)
def test_objective_of_one_token_equals_hand_computed_values(
    name: str, log_prob: float, anchor: float, advantage: float, options: dict[str, Any], expected: tuple[float, float]
) -> None:
    """Loss and gradient by the log-prob."""
    result, gradient = evaluated(name, one_token(log_prob, anchor, advantage), options)
    assert (result.loss.item(), float(gradient[0, 0])) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected"),
    [
        (1.0, 2.0, 3.0, (-2.0, -2.0, False, False)),
        (1.5, 1.0, 3.0, (-1.28, 0.0, True, False)),  # clipped above
        (0.5, 1.0, 3.0, (-0.5, -0.5, False, False)),  # a good token may always rise
        (0.5, -1.0, 3.0, (0.8, 0.0, True, False)),  # clipped below
        (1.5, -1.0, 3.0, (1.5, 1.5, False, False)),  # a bad token may always fall ...
        (5.0, -1.0, 3.0, (3.0, 0.0, False, True)),  # ... up to the dual clip
        (5.0, -1.0, None, (5.0, 5.0, False, False)),
        (5.0, 1.0, 3.0, (-1.28, 0.0, True, False)),  # the dual clip never touches A > 0
        (0.1, 1.0, 3.0, (-0.1, -0.1, False, False)),
        (5.0, 0.0, 3.0, (0.0, 0.0, False, False)),
        (5.0, 0.0, None, (0.0, 0.0, False, False)),
    ],
)
def test_ppo_clip_equals_hand_computed_values(
    ratio: float, advantage: float, dual_clip: float | None, expected: tuple[float, float, bool, bool]
) -> None:
    """With clip range 0.8 .. 1.28; the gradient is d loss / d log-prob, -A r where it moves."""
    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    result, gradient = evaluated("ppo_clip", one_token(-1.0, -1.0 - math.log(ratio), advantage), options)
    assert (bool(result.clipped), bool(result.clipped_lower)) == expected[2:]
    assert (result.loss.item(), float(gradient[0, 0])) == pytest.approx(expected[:2], abs=1e-12)


@pytest.mark.parametrize("nats", [9.0, 18.0])
def test_bent_ratios_keep_their_small_gradients_in_float32(nats: float) -> None:
    """beta w / (w + beta)^2 is nearly beta / w; 1 - w / (w + beta) would have lost all its digits."""
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    inputs = one_token(-1.0, -1.0 - nats, 1.0).inputs(log_probs)
    (gradient,) = torch.autograd.grad(OBJECTIVES["exgrpo"].function(inputs, beta=0.1).loss.sum(), log_probs)
    w = math.exp(nats)
    assert float(gradient) == pytest.approx(-0.1 * w / (w + 0.1) ** 2, rel=1e-5)
