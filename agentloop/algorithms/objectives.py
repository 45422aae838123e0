"""What a token's loss is: one function per objective, by name; any of them for rows of any kind.

Every one takes an `ObjectiveInput` and its own options, and gives a `PolicyLoss`: exactly 0, with a gradient of exactly
0, outside the loss mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from agentloop.algorithms.log_probs import log_ratios


@dataclass(frozen=True)
class PolicyLoss:
    """One loss and two flags per token, [B, T]; 0 and False outside the loss mask."""

    loss: Tensor
    """Carries gradient."""
    clipped: Tensor
    """bool: a bound of the objective decided the loss."""
    clipped_lower: Tensor
    """bool: the dual clip decided the loss; only where the advantage is negative."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenRows:
    """What of its rows a loss is made from, whatever the policy thinks of them."""

    behavior_log_probs: Tensor
    """[B, T] float32, nats; NaN where no behavior policy is known."""
    advantages: Tensor
    """[B, T] float32, reward units: the trajectory's advantage, or the token's own; 0 where not trained."""
    loss_mask: Tensor
    """[B, T] bool: trained on."""
    trajectory: Tensor
    """[B] int64: the trajectory of which each row is a segment."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ObjectiveInput(TokenRows):
    """Rows of one stream, before aggregation.

    Outside `loss_mask` every [B, T] array but the mask is 0 and cut off from the gradient, whatever was passed: a wild
    or unknown number of a token that is not trained can't reach the loss. Everything but `log_probs` must be detached.
    """

    log_probs: Tensor
    """[B, T] nats, current weights; carries gradient."""
    anchors: Tensor
    """[B, T] nats: the denominator of the ratio, `old` or `behavior` as the stream's anchor says."""
    num_trajectories: int
    """Trajectories of the whole batch; not all of them need to have a row here."""
    signal_share: Tensor
    """[B]: of the row's stream, the share of the optimizer step's trajectories that have an advantage other than 0."""

    def __post_init__(self) -> None:
        for name in ("anchors", "behavior_log_probs", "advantages", "signal_share"):
            if getattr(self, name).requires_grad:
                raise ValueError(f"{name} must be detached, got a tensor that requires grad. Call .detach() on it.")
        zero = torch.zeros((), dtype=self.log_probs.dtype, device=self.log_probs.device)
        for name in ("log_probs", "anchors", "behavior_log_probs", "advantages"):
            whole = getattr(self, name).to(self.log_probs.dtype)
            object.__setattr__(self, name, torch.where(self.loss_mask, whole, zero))

    @cached_property
    def log_ratios(self) -> Tensor:
        """[B, T] nats: clamp(log_probs - anchors, -20, 20); beyond the bound a ratio carries no gradient."""
        return log_ratios(self.log_probs, self.anchors, self.loss_mask)

    def only(self, mask: Tensor) -> ObjectiveInput:
        """With those trained tokens alone that are in `mask` [B, T]."""
        return replace(self, loss_mask=self.loss_mask & mask)

    def rows(self, positions: Tensor) -> ObjectiveInput:
        """Some of the rows."""
        names = ("log_probs", "anchors", "behavior_log_probs", "advantages", "loss_mask", "trajectory", "signal_share")
        chosen = replace(self, **{name: getattr(self, name)[positions] for name in names})
        vars(chosen)["log_ratios"] = self.log_ratios[positions]  # made once, whatever the number of parts
        return chosen

    def trajectory_sum(self, values: Tensor) -> Tensor:
        """[B, 1]: the sum of [B, T] values over the trained tokens of the row's whole trajectory, with gradient."""
        rows = torch.where(self.loss_mask, values, torch.zeros_like(values)).sum(dim=1)
        return rows.new_zeros(self.num_trajectories).index_add(0, self.trajectory, rows)[self.trajectory][:, None]

    def trajectory_mean(self, values: Tensor) -> Tensor:
        """[B, 1]: likewise their mean; 0 for a trajectory without a trained token."""
        return self.trajectory_sum(values) / self.trajectory_sum(torch.ones_like(values)).clamp_min(1)


Objective = Callable[[ObjectiveInput], PolicyLoss]
"""An objective with its options bound."""


def unclipped(loss: Tensor) -> PolicyLoss:
    """The loss of an objective that has no bounds."""
    never = torch.zeros_like(loss, dtype=torch.bool)
    return PolicyLoss(loss, never, never)


_LEAST_PROBABILITY = 1e-8


def surrogate(inputs: ObjectiveInput) -> PolicyLoss:
    """-A r: the surrogate that TRPO maximises (Schulman et al. 2015, arXiv 1502.05477), without its constraint."""
    return unclipped(-inputs.advantages * inputs.log_ratios.exp())


def ppo_clip(inputs: ObjectiveInput, *, clip_low: float, clip_high: float, dual_clip: float | None) -> PolicyLoss:
    """PPO's clipped surrogate with a lower bound (Schulman et al. 2017, arXiv 1707.06347; dual clip: Ye et al. 2020,
    arXiv 1912.09729).

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where A < 0 at most -A dual_clip; None turns the dual clip
    off. Gradient remains where A > 0 and r < 1 + clip_high, and where A < 0 and 1 - clip_low < r < dual_clip.
    """
    ratios = inputs.log_ratios.exp()
    whole = clipped_surrogate(ratios, inputs.advantages, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is None:
        return whole
    # Not -A x dual_clip everywhere: with A >= 0 there is no ceiling.
    ceiling = torch.where(inputs.advantages < 0, -inputs.advantages * dual_clip, torch.inf)
    return PolicyLoss(torch.minimum(whole.loss, ceiling), whole.clipped, (whole.loss > ceiling).detach())


def clipped_surrogate(ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) of any [B, T] ratios."""
    plain = -advantages * ratios
    bounded = -advantages * ratios.clamp(1 - clip_low, 1 + clip_high)
    clipped = (bounded > plain).detach()
    return PolicyLoss(torch.maximum(plain, bounded), clipped, torch.zeros_like(clipped))


def cispo(inputs: ObjectiveInput, *, ratio_low: float, ratio_high: float) -> PolicyLoss:
    """-w A log_prob with w = clip(r, ratio_low, ratio_high) without gradient (CISPO, MiniMax 2025, arXiv 2506.13585).

    The weight is bounded and no token loses its gradient. The bounds are those of the ratio itself, not of its
    distance from 1; the paper sets no lower one.
    """
    ratios = inputs.log_ratios.exp().detach()
    weights = ratios.clamp(ratio_low, ratio_high)
    clipped = (weights != ratios) & (inputs.advantages != 0)
    return PolicyLoss(-weights * inputs.advantages * inputs.log_probs, clipped, torch.zeros_like(clipped))


def dppo_tv(inputs: ObjectiveInput, *, divergence_low: float, divergence_high: float, ratio_high: float) -> PolicyLoss:
    """-w A log_prob inside the trust region, 0 outside, w = min(r, ratio_high) without gradient (DPPO with the binary
    total variation, Qi et al. 2026, arXiv 2602.04879).

    With p and q the probabilities under log_probs and anchors: a token is outside where A > 0 and p - q >
    divergence_high, or A < 0 and p - q < -divergence_low: what would lead further away is left out, and what leads
    back is not. |p - q| is the total variation between "this token" and "any other".
    """
    moved = inputs.log_probs.detach().exp() - inputs.anchors.exp()
    return _within(inputs, moved, low=divergence_low, high=divergence_high, ratio_high=ratio_high)


def dppo_kl(inputs: ObjectiveInput, *, divergence_low: float, divergence_high: float, ratio_high: float) -> PolicyLoss:
    """`dppo_tv` with the binary KL divergence (the same paper).

    A token is outside where its divergence q log(q / p) + (1 - q) log((1 - q) / (1 - p)), that of "this token" and "any
    other" from the anchor's policy to the current one, is over divergence_high with A > 0 and p > q, or over
    divergence_low with A < 0 and p < q. Probabilities of other tokens below 1e-8 count as 1e-8.
    """
    now, then = inputs.log_probs.detach(), inputs.anchors
    others_now, others_then = ((-logs.expm1()).clamp_min(_LEAST_PROBABILITY) for logs in (now, then))
    divergence = then.exp() * (then - now) + others_then * (others_then / others_now).log()
    moved = divergence * (now - then).sign()
    return _within(inputs, moved, low=divergence_low, high=divergence_high, ratio_high=ratio_high)


def _within(inputs: ObjectiveInput, moved: Tensor, *, low: float, high: float, ratio_high: float) -> PolicyLoss:
    """-w A log_prob but where A > 0 and `moved` > high, or A < 0 and `moved` < -low; w = min(r, ratio_high)."""
    outside = torch.where(inputs.advantages > 0, moved > high, moved < -low)
    outside &= inputs.advantages != 0
    weights = inputs.log_ratios.exp().detach().clamp_max(ratio_high)
    loss = -weights * inputs.advantages * inputs.log_probs
    return PolicyLoss(torch.where(outside, torch.zeros_like(loss), loss), outside, torch.zeros_like(outside))


def gspo(inputs: ObjectiveInput, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean of the trajectory's log-ratios) (GSPO, Zheng et
    al. 2025, arXiv 2507.18071).

    In the paper's token form: s_t = sg(s) exp(d_t - sg(d_t)), of equal value, lets every token have its own
    advantage, and has the same gradient where all are equal. The paper's average is seq-mean-token-mean.
    """
    differences = inputs.log_ratios
    mean = inputs.trajectory_mean(differences.detach())
    ratios = (mean + differences - differences.detach()).exp()
    return clipped_surrogate(ratios, inputs.advantages, clip_low=clip_low, clip_high=clip_high)


def gmpo(inputs: ObjectiveInput, *, log_ratio_low: float, log_ratio_high: float) -> PolicyLoss:
    """-A g, g = exp(mean of the trajectory's clipped log-ratios) (GMPO, Zhao et al. 2025, arXiv 2507.20673).

    A log-ratio d is min(d, log_ratio_high) where A > 0, max(d, -log_ratio_low) where A < 0, and 0 where A = 0: a
    geometric mean of PPO's clipped tokens. The paper's average is seq-mean-token-mean.
    """
    differences, a = inputs.log_ratios, inputs.advantages
    bounded = torch.where(a > 0, differences.clamp_max(log_ratio_high), differences.clamp_min(-log_ratio_low))
    bounded = torch.where(a == 0, torch.zeros_like(bounded), bounded)
    clipped = ((bounded != differences) & (a != 0)).detach()
    loss = -a * inputs.trajectory_mean(bounded).exp()
    return PolicyLoss(loss, clipped, torch.zeros_like(clipped))


def sapo(inputs: ObjectiveInput, *, tau_positive: float, tau_negative: float) -> PolicyLoss:
    """-A f(r), f(r) = (4 / tau) sigmoid(tau (r - 1)) (SAPO, Gao et al. 2025, arXiv 2511.20347).

    tau is tau_positive where A > 0, else tau_negative. The gradient is that of f itself, -A 4 s (1 - s) r with s the
    sigmoid: -A at r = 1, fading on both sides. Weighing log-probs by f would grow with r instead.
    """
    positive = inputs.advantages > 0
    tau = torch.where(positive, tau_positive, tau_negative).to(inputs.log_probs.dtype)
    return unclipped(-inputs.advantages * 4 / tau * _sigmoid(tau * (inputs.log_ratios.exp() - 1)))


def exgrpo(inputs: ObjectiveInput, *, beta: float) -> PolicyLoss:
    """-A w / (w + beta), w = pi / pi_behavior (ExGRPO, Zhan et al. 2025, arXiv 2510.02245).

    The anchor must be `behavior`. Its gradient -A beta w / (w + beta)^2 is largest at w = beta: a large w limits
    itself. At w = 1 and beta = 0.1 it is 0.1 / 1.21 = 0.083 of an unclipped token's.
    """
    return unclipped(-inputs.advantages * _sigmoid(inputs.log_ratios - math.log(beta)))


def luffy(inputs: ObjectiveInput, *, gamma: float) -> PolicyLoss:
    """-A p / (p + gamma), p = exp(log_prob): a behavior probability of 1 (LUFFY, Yan et al. 2025, arXiv 2504.14945).

    For tokens of which nobody knows how likely their author found them. The gradient -A gamma p / (p + gamma)^2 is
    largest at p = gamma.
    """
    return unclipped(-inputs.advantages * _sigmoid(inputs.log_probs - math.log(gamma)))


def _sigmoid(x: Tensor) -> Tensor:
    """The sigmoid with an exact gradient where it is close to 1: there 1 - s would lose its digits."""
    return torch.where(x > 0, 1 - torch.sigmoid(-x), torch.sigmoid(x))


def reinforce(inputs: ObjectiveInput) -> PolicyLoss:
    """-A log_prob (Williams 1992). Summed or averaged over tokens as the aggregation says: the paper sums.

    Knows no ratio: rows of another policy are taken as if the current one had sampled them.
    """
    return unclipped(-inputs.advantages * inputs.log_probs)


def gpg(inputs: ObjectiveInput) -> PolicyLoss:
    """-a A log_prob (GPG, Chu et al. 2025, arXiv 2504.02546), a = 1 / the share of trajectories with a signal.

    A group of equal rewards has no gradient and still counts in the denominators; `a` gives back what it takes. It is
    counted over the stream's trajectories of the whole optimizer step, so it does not depend on the micro-batches.
    """
    return unclipped(-inputs.advantages * inputs.log_probs / inputs.signal_share[:, None].to(inputs.log_probs.dtype))


def topr(inputs: ObjectiveInput, *, ratio_high: float) -> PolicyLoss:
    """-w A log_prob, w = 1 where A >= 0, else min(R, ratio_high) without gradient, R the ratio of the whole trajectory
    (Tapered Off-Policy REINFORCE, Le Roux et al. 2025, arXiv 2503.14286).

    R = exp(sum of the trajectory's log-ratios), a product of tokens as in the paper: what the policy hardly does any
    more is not pushed down further.
    """
    log_weights = inputs.trajectory_sum(inputs.log_ratios.detach())
    negative = inputs.advantages < 0
    weights = torch.where(negative, log_weights.clamp_max(math.log(ratio_high)).exp(), torch.ones_like(log_weights))
    clipped = negative & (log_weights > math.log(ratio_high))
    return PolicyLoss(-weights * inputs.advantages * inputs.log_probs, clipped, torch.zeros_like(clipped))


def bc(inputs: ObjectiveInput, *, coef: float, weighting: Literal["uniform", "advantage"]) -> PolicyLoss:
    """-coef u log_prob: behavior cloning, cross-entropy on what the rows hold.

    u = 1 (`uniform`), whatever the advantage, or max(A, 0) (`advantage`): failures are then not imitated. Knows no
    ratio and no behavior policy.
    """
    weights = inputs.loss_mask.to(inputs.log_probs.dtype) if weighting == "uniform" else inputs.advantages.clamp_min(0)
    return unclipped(-coef * weights * inputs.log_probs)


@dataclass(frozen=True)
class ObjectiveKind:
    """An objective, and what a pass over some of the rows must know of it."""

    function: Callable[..., PolicyLoss]
    whole_trajectories: bool = False
    """A token's loss depends on all rows of its trajectory: they must be in one pass."""
    needs_advantage: bool = True
    """Where the advantage is 0 there is neither loss nor gradient: such rows can be left out."""


OBJECTIVES = {
    "reinforce": ObjectiveKind(reinforce),
    "surrogate": ObjectiveKind(surrogate),
    "ppo_clip": ObjectiveKind(ppo_clip),
    "gspo": ObjectiveKind(gspo, whole_trajectories=True),
    "cispo": ObjectiveKind(cispo),
    "sapo": ObjectiveKind(sapo),
    "gmpo": ObjectiveKind(gmpo, whole_trajectories=True),
    "gpg": ObjectiveKind(gpg),
    "dppo_tv": ObjectiveKind(dppo_tv),
    "dppo_kl": ObjectiveKind(dppo_kl),
    "topr": ObjectiveKind(topr, whole_trajectories=True),
    "exgrpo": ObjectiveKind(exgrpo),
    "luffy": ObjectiveKind(luffy),
    "bc": ObjectiveKind(bc, needs_advantage=False),
}
