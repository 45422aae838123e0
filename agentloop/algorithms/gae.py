"""Computes advantages from a critic over the action tokens of whole trajectories, and the critic's own loss."""

import torch
from torch import Tensor

from agentloop.algorithms.advantages import WHITENING_EPSILON
from agentloop.algorithms.log_probs import require_detached


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    bootstrap: Tensor,
    response_mask: Tensor,
    trajectory: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Estimate advantages (GAE, Schulman et al. 2016, arXiv 1506.02438), [B, T]; 0 except on action tokens.

    A_k = sum over l >= 0 of (gamma gae_lambda)^l delta_{k+l} with delta_k = r_k + gamma V_{k+1} - V_k. k counts
    only the action tokens of a trajectory, in order over its rows: the text of tools and users takes no time.

    `rewards` and `values` [B, T] are in reward units; a value is that of the state before the token. `bootstrap` [N] is
    the value after the last action token of each trajectory, 0 where the episode ended. `trajectory` [B] is each row's
    trajectory, whose rows must be in order.
    """
    lines, columns = response_mask.nonzero(as_tuple=True)
    owners, places, lengths = _in_order(trajectory[lines], len(bootstrap))
    if len(lines) == 0:
        return torch.zeros_like(values)
    table = torch.zeros((2, len(bootstrap), int(lengths.max())), dtype=torch.float64, device=values.device)
    table[0, owners, places] = rewards[lines, columns].double()
    table[1, owners, places] = values[lines, columns].double()
    advantages = torch.zeros_like(table[0])
    later = torch.zeros_like(advantages[:, 0])
    following = bootstrap.double()
    for k in range(table.shape[2] - 1, -1, -1):
        there = k < lengths
        delta = table[0, :, k] + gamma * following - table[1, :, k]
        later = torch.where(there, delta + gamma * gae_lambda * later, later)
        following = torch.where(there, table[1, :, k], following)
        advantages[:, k] = later
    result = torch.zeros_like(values)
    result[lines, columns] = advantages[owners, places].to(values.dtype)
    return result


def at_last_action_token(scores: Tensor, response_mask: Tensor, trajectory: Tensor) -> Tensor:
    """Make rewards [B, T] that give the score [N] of each trajectory to its last action token.

    The score of a trajectory without an action token is left out.
    """
    rows, columns = response_mask.nonzero(as_tuple=True)
    owners, places, lengths = _in_order(trajectory[rows], len(scores))
    last = places == lengths[owners] - 1
    rewards = torch.zeros(response_mask.shape, dtype=scores.dtype, device=scores.device)
    rewards[rows[last], columns[last]] = scores[owners[last]]
    return rewards


def _in_order(owners: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the trajectory of each action token, its place there, and each trajectory's number of tokens [N]."""
    lengths = torch.bincount(owners, minlength=count)
    order = torch.argsort(owners, stable=True)
    begins = lengths.cumsum(0) - lengths
    places = torch.empty_like(owners)
    places[order] = torch.arange(len(owners), device=owners.device) - begins[owners[order]]
    return owners, places, lengths


def whiten_tokens(advantages: Tensor, mask: Tensor, population: Tensor) -> Tensor:
    """Whiten advantages by those of `population`: (A - mean) / sqrt(variance + 1e-8) in `mask`, 0 elsewhere.

    Tokens outside the population are divided by the deviation of all tokens in `mask` instead. So they do not change
    the population, and stay small if the population is nearly equal. Equal advantages become exactly 0.
    """
    if not bool(population.any()):
        return torch.zeros_like(advantages)
    values = advantages.double()
    mean = _mean(values[population])
    scale = torch.where(population, _deviation(values[population]), _deviation(values[mask]))
    return torch.where(mask, (values - mean) / scale, 0.0).to(advantages.dtype)


def _mean(values: Tensor) -> Tensor:
    """Compute the mean. The mean of equal values is exactly their value: rounding must not become a signal."""
    return values[0] if bool((values == values[:1]).all()) else values.mean()


def _deviation(values: Tensor) -> Tensor:
    variance = values.var() if len(values) > 1 else values.new_zeros(())
    return (variance + WHITENING_EPSILON).sqrt()


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, mask: Tensor, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Compute losses [B, T] in squared reward units, and where the clip range decided them; 0, False outside `mask`.

    0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) with c = `value_clip`; if that is None, 0.5 (V - R)^2.

    This is PPO's clipped value loss with the factor 1/2 (as in the code of Schulman et al. 2017, verl and TRL): the
    gradient of an unclipped token is V - R. Raises ValueError if old values or returns require grad.
    """
    require_detached(old_values=old_values, returns=returns)
    # Replaced before the arithmetic: whatever stands outside the mask must not reach the gradient as 0 x inf.
    values, old_values, returns = (torch.where(mask, t, torch.zeros_like(t)) for t in (values, old_values, returns))
    plain = (values - returns).square()
    if value_clip is None:
        return 0.5 * plain, torch.zeros_like(mask)
    # Not old + clamp(values - old): that is rounded also where nothing is clipped.
    near = values.clamp(old_values - value_clip, old_values + value_clip)
    bounded = (near - returns).square()
    return 0.5 * torch.maximum(plain, bounded), (bounded > plain).detach()


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """Compute 1 - Var(R - V) / Var(R) of values and returns [n]: 1 is perfect, 0 no better than a constant.

    None where returns don't vary.
    """
    if len(returns) < 2:
        return None
    spread = float(returns.double().var(correction=0))
    return None if spread == 0.0 else 1.0 - float((returns.double() - values.double()).var(correction=0)) / spread
