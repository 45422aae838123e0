"""Losses and gradients of single tokens that are known as numbers."""

import math

import numpy as np
import pytest

from tests.agentloop.algorithms.test_objectives import one_token


def at_ratio(name: str, ratio: float, advantage: float, **options: float | None) -> tuple[float, float]:
    """Loss, and d loss / d log-prob, of one token of this ratio to its anchor."""
    return one_token(name, -1.0, -1.0 - math.log(ratio), advantage, **options)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.2, 0.0),  # max(-1 x 1.5, -1 x 1.2): clipped
        (0.5, 1.0, -0.5, -0.5),  # max(-1 x 0.5, -1 x 0.8); gradient -A r
        (5.0, -1.0, 3.0, 0.0),  # min(max(1 x 5, 1 x 1.2), 1 x 3): the dual clip
    ],
)
def test_ppo_clip_of_two_tenths_with_dual_clip_three(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    found = at_ratio("ppo_clip", ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert found == pytest.approx((loss, gradient), abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "moving", "still"),
    [
        (1.0, [0.01, 0.79, 1.0, 1.27], [1.29, 5.0]),  # r < 1 + 0.28
        (-1.0, [0.81, 1.0, 1.29, 2.99], [0.01, 0.79, 3.01]),  # 1 - 0.2 < r < 3
    ],
)
def test_ppo_clip_has_a_gradient_exactly_where_the_bounds_leave_one(
    advantage: float, moving: list[float], still: list[float]
) -> None:
    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    for ratio in moving:
        assert at_ratio("ppo_clip", ratio, advantage, **options)[1] == pytest.approx(-advantage * ratio)
    assert [at_ratio("ppo_clip", ratio, advantage, **options)[1] for ratio in still] == [0.0] * len(still)


@pytest.mark.parametrize(
    ("difference", "advantage", "loss"),
    [
        (95.0, 1.0, -1.28),  # e^20, and clipped to 1.28
        (95.0, -1.0, 3.0),  # e^20, and the dual clip
        (-95.0, 1.0, -math.exp(-20)),  # 95 nats are taken for 20 ...
        (-95.0, -1.0, 0.8),
    ],
)
def test_stored_log_prob_95_nats_off_has_a_finite_loss_and_no_gradient(
    difference: float, advantage: float, loss: float
) -> None:
    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert one_token("ppo_clip", -1.0, -1.0 - difference, advantage, **options) == pytest.approx((loss, 0.0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "sigmoid", "gradient"),
    [
        (1.0, 1.0, 0.5, -1.0),  # 1 / (1 + e^0); 4 x 0.5 x 0.5 x 1
        (0.5, 1.0, 0.377541, -0.470008),  # 1 / (1 + e^0.5); 4 x 0.377541 x 0.622459 x 0.5
        (4.0, 1.0, 0.952574, -0.722826),  # 1 / (1 + e^-3); 4 x 0.952574 x 0.047426 x 4
        (2.0, -1.0, 0.740775, 1.536222),  # tau 1.05: 1 / (1 + e^-1.05); 4 x 0.740775 x 0.259225 x 2
    ],
)
def test_sapo_gradient_is_four_sigmoids_of_the_ratio_times_the_ratio(
    ratio: float, advantage: float, sigmoid: float, gradient: float
) -> None:
    """-A 4 s (1 - s) r. Weighing the log-prob by f(r) = 4 s would give 3.81 at r = 4: growing, where it should fade."""
    tau = 1.0 if advantage > 0 else 1.05
    loss, found = at_ratio("sapo", ratio, advantage, tau_positive=1.0, tau_negative=1.05)
    assert loss == pytest.approx(-advantage * 4 / tau * sigmoid, rel=1e-5)
    assert found == pytest.approx(gradient, rel=1e-5)


EXGRPO = [
    # beta w / (w + beta)^2, beta 0.1
    (0.01, 0.083),  # 0.001 / 0.0121
    (0.05, 0.222),  # 0.005 / 0.0225
    (0.1, 0.250),  # 0.01 / 0.04: the most, at w = beta
    (0.5, 0.139),  # 0.05 / 0.36
    (1.0, 0.083),  # 0.1 / 1.21: twelve times weaker than an unclipped token
    (2.0, 0.045),  # 0.2 / 4.41
    (10.0, 0.0098),  # 1 / 102.01
]


@pytest.mark.parametrize(("weight", "gradient"), EXGRPO)
def test_exgrpo_gradient_weights(weight: float, gradient: float) -> None:
    assert -at_ratio("exgrpo", weight, 1.0, beta=0.1)[1] == pytest.approx(gradient, rel=0.01)


def test_exgrpo_weighs_most_at_beta_and_a_twelfth_at_ratio_one() -> None:
    weights = {w: -at_ratio("exgrpo", w, 1.0, beta=0.1)[1] for w in np.geomspace(0.001, 100.0, 501).tolist()}
    assert max(weights, key=lambda w: weights[w]) == pytest.approx(0.1, rel=0.02)
    surrogate = -at_ratio("surrogate", 1.0, 1.0)[1]
    assert surrogate / -at_ratio("exgrpo", 1.0, 1.0, beta=0.1)[1] == pytest.approx(12.1)  # 1.21 / 0.1


@pytest.mark.parametrize(
    ("probability", "loss", "gradient"),
    [
        (0.1, 0.5, 0.25),  # 0.1 / 0.2; 0.01 / 0.04
        (1.0, 0.909, 0.0826),  # 1 / 1.1; 0.1 / 1.21
        (0.001, 0.0099, 0.0098),  # 0.001 / 0.101; 0.0001 / 0.010201
    ],
)
def test_luffy_takes_the_behavior_probability_for_one(probability: float, loss: float, gradient: float) -> None:
    found = one_token("luffy", math.log(probability), math.nan, 1.0, gamma=0.1)
    assert found == pytest.approx((-loss, -gradient), rel=0.01)
