"""Turns the drift from the behavior policy to the old policy into weights of tokens.

The objective's ratio is the current policy over the old one (anchor `old`). The weights are the old policy over the
behavior policy. They have no gradient, and multiply the token losses (decoupled PPO, Hilton et al. 2022, arXiv
2110.00641; Yao et al. 2025 on truncated weights).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentloop.algorithms.log_probs import LOG_RATIO_BOUND, log_ratios

CorrectionKind = Literal["none", "truncate", "mask", "rejection"]
Level = Literal["token", "turn", "sequence"]
Mean = Literal["product", "geometric"]


@dataclass(frozen=True)
class Correction:
    """How one stream's weights are computed. A unit is a token, a turn or a trajectory; see `correct`."""

    kind: CorrectionKind
    level: Level = "token"
    mean: Mean = "product"
    ratio_low: float = 0.0
    ratio_high: float = math.inf


@dataclass(frozen=True)
class Corrected:
    """The weight of each token, and whether it is trained; both [B, T]."""

    weights: Tensor
    """float64; 1 where there is no action token."""
    kept: Tensor
    """bool: False where rejection leaves a token out of the loss and of every denominator."""


def correct(
    old_log_probs: Tensor,
    behavior_log_probs: Tensor,
    *,
    response_mask: Tensor,
    trajectory: Tensor,
    correction: Correction,
) -> Corrected:
    """Compute the weights of tokens. `trajectory` [B] is each row's trajectory, whose segments must be in order.

    An action token has d = clamp(old - behavior, -20, 20), or 0 where the behavior policy is unknown. A unit has the
    weight w = exp(sum of d) (`product`) or exp(mean of known d) (`geometric`), with the exponent clamped to +-20. Units
    are single tokens, turns (maximal runs of action tokens of a row), or trajectories over all their rows.

    - truncate: min(w, ratio_high)
    - mask: w where ratio_low <= w <= ratio_high, else 0; denominators keep the token
    - rejection: 1 where ratio_low <= w <= ratio_high; elsewhere the token is not trained at all
    """
    weights = torch.ones(old_log_probs.shape, dtype=torch.float64, device=old_log_probs.device)
    kept = torch.ones_like(response_mask)
    if correction.kind == "none" or not bool(response_mask.any()):
        return Corrected(weights, kept)
    units = _units(response_mask, trajectory, correction.level)
    logs = _unit_logs(old_log_probs, behavior_log_probs, response_mask, units, mean=correction.mean)
    low = -math.inf if correction.ratio_low == 0.0 else math.log(correction.ratio_low)
    high = math.log(correction.ratio_high)
    inside = (logs >= low) & (logs <= high)
    match correction.kind:
        case "truncate":
            weights[response_mask] = logs.clamp_max(high).exp()[units]
        case "mask":
            weights[response_mask] = (logs.exp() * inside)[units]
        case "rejection":
            kept[response_mask] = inside[units]
    return Corrected(weights, kept)


def _units(response_mask: Tensor, trajectory: Tensor, level: Level) -> Tensor:
    """Number the units from 0, and return the number of each action token's unit, row by row."""
    rows = response_mask.nonzero()[:, 0]
    if level == "token":
        return torch.arange(len(rows), device=rows.device)
    if level == "turn":
        starts = response_mask.clone()
        starts[:, 1:] &= ~response_mask[:, :-1]
        return starts[response_mask].cumsum(0) - 1
    return trajectory[rows]


def _unit_logs(
    old_log_probs: Tensor, behavior_log_probs: Tensor, response_mask: Tensor, units: Tensor, *, mean: Mean
) -> Tensor:
    """Compute log w of each unit, [U] float64 nats, clamped."""
    known = response_mask & behavior_log_probs.isfinite()
    drift = log_ratios(old_log_probs, behavior_log_probs, known).double()[response_mask]
    count = int(units.max()) + 1
    logs = drift.new_zeros(count).index_add_(0, units, drift)
    if mean == "geometric":
        tokens = drift.new_zeros(count).index_add_(0, units, known[response_mask].double())
        logs = logs / tokens.clamp_min(1)
    return logs.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
