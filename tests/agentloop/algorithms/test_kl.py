"""Estimators and their gradients against their formulas in plain Python."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from agentloop.algorithms.kl import Estimator, KlGradient, kl_loss

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
GRADIENTS: tuple[KlGradient, ...] = get_args(KlGradient)


def written(estimator: str, d: float) -> tuple[float, float]:
    """The estimate at d = log policy - log reference, and its derivative by the policy's log-prob."""
    if estimator == "k3" and math.exp(-d) - 1 + d > 10.0:
        return 10.0, 0.0
    return {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}[estimator]


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_loss_and_gradient_equal_the_written_formula(estimator: Estimator, gradient: KlGradient) -> None:
    rng = np.random.default_rng(5)
    log_p, ref, anchor = (-rng.uniform(0, 30, 300) for _ in range(3))
    mask = torch.from_numpy(rng.random(300) < 0.7)
    now = torch.tensor(log_p, requires_grad=True)
    tokens = kl_loss(now, torch.tensor(ref), mask, anchors=torch.tensor(anchor), estimator=estimator, gradient=gradient)
    (slopes,) = torch.autograd.grad(tokens.sum(), now)
    for i in range(300):
        value = slope = 0.0
        if mask[i]:
            d, log_r = log_p[i] - ref[i], log_p[i] - anchor[i]
            inside = abs(d) <= 20.0  # beyond the bound a log-ratio stands still
            value, slope = written(estimator, min(max(d, -20.0), 20.0))
            slope = slope if inside else 0.0
            if gradient == "importance":
                r = math.exp(min(max(log_r, -20.0), 20.0))
                value, slope = r * value, r * slope + (r * value if abs(log_r) <= 20.0 else 0.0)
        assert tokens[i].item() == pytest.approx(value, rel=1e-6, abs=1e-12)
        assert slopes[i].item() == pytest.approx(slope, rel=1e-6, abs=1e-12)
    assert abs(slopes[mask]).max() > 0


def mean_gradient(estimator: Estimator, gradient: KlGradient, *, sampled_by: str) -> tuple[float, Tensor, Tensor]:
    """Over all tokens of a small vocabulary: the mean of the loss and of its gradient by the policy's logits, and the
    gradient of KL(policy || reference) itself."""
    generator = torch.Generator().manual_seed(1)
    logits, ref_logits, other = torch.randn((3, 6), generator=generator, dtype=torch.float64)
    ref_logits = logits + 1.2 * ref_logits.clamp(-1, 1)  # no token beyond the bound of k3
    logits.requires_grad_()
    log_p, log_ref, log_q = (torch.log_softmax(x, 0) for x in (logits, ref_logits, other))
    behavior = log_p.detach() if sampled_by == "policy" else log_q
    everywhere = torch.ones(6, dtype=torch.bool)
    tokens = kl_loss(log_p, log_ref, everywhere, anchors=behavior, estimator=estimator, gradient=gradient)
    mean = (behavior.exp() * tokens).sum()
    (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
    kl = (log_p.exp() * (log_p - log_ref)).sum()
    (wanted,) = torch.autograd.grad(kl, logits)
    return mean.item() - kl.item(), found, wanted


@pytest.mark.parametrize(
    ("estimator", "gradient", "sampled_by"),
    [
        ("k2", "plain", "policy"),
        ("k1", "importance", "policy"),
        ("k3", "importance", "policy"),
        ("k1", "importance", "another policy"),
        ("k3", "importance", "another policy"),
    ],
)
def test_gradient_correct_forms_have_the_kl_slope(estimator: Estimator, gradient: KlGradient, sampled_by: str) -> None:
    bias, found, wanted = mean_gradient(estimator, gradient, sampled_by=sampled_by)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert float(wanted.abs().max()) > 0.1
    if estimator in ("k1", "k3"):
        assert bias == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", ["ref_log_probs", "anchors"])
def test_kl_loss_refuses_a_reference_or_anchors_with_a_gradient(name: str) -> None:
    tensors = {"ref_log_probs": torch.zeros(1), "anchors": torch.zeros(1)}
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} must be detached"):
        kl_loss(torch.zeros(1), mask=torch.tensor([True]), **tensors, estimator="k3", gradient="plain")
