"""Advantages from a critic over the action tokens of whole trajectories, and the loss that the critic learns by."""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentloop.algorithms.advantages import WHITENING_EPSILON
from agentloop.algorithms.log_probs import require_detached


@dataclass(frozen=True, eq=False, kw_only=True)
class CriticRows:
    """Rows of a batch as a critic sees them; those of one trajectory must be in their order. Reward units."""

    rewards: Tensor
    """[B, T]"""
    values: Tensor
    """[B, T]: of the state before each action token."""
    bootstrap: Tensor
    """[N]: value behind the last action token of each trajectory; 0 where the episode ended."""
    response_mask: Tensor
    """[B, T] bool: action tokens."""
    loss_mask: Tensor
    """[B, T] bool: trained on."""
    replay_mask: Tensor
    """[B] bool: replayed rows."""
    trajectory: Tensor
    """[B] int64: the trajectory of which each row is a segment."""


def gae(rows: CriticRows, *, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates (Schulman et al. 2016, arXiv 1506.02438), [B, T]; 0 but on action tokens.

    A_k = sum over l >= 0 of (gamma gae_lambda)^l delta_{k+l} with delta_k = r_k + gamma V_{k+1} - V_k. k counts the
    action tokens of a trajectory alone, in order over its rows: what tools and users wrote takes no time.
    """
    values, bootstrap = rows.values, rows.bootstrap
    lines, columns = rows.response_mask.nonzero(as_tuple=True)
    owners, places, lengths = _in_order(rows.trajectory[lines], len(bootstrap))
    if len(lines) == 0:
        return torch.zeros_like(values)
    table = torch.zeros((2, len(bootstrap), int(lengths.max())), dtype=torch.float64, device=values.device)
    table[0, owners, places] = rows.rewards[lines, columns].double()
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
    """[B, T] rewards from scores [N] of trajectories: all of it at the last action token, over all rows.

    A trajectory without an action token keeps its score to itself.
    """
    rows, columns = response_mask.nonzero(as_tuple=True)
    owners, places, lengths = _in_order(trajectory[rows], len(scores))
    last = places == lengths[owners] - 1
    rewards = torch.zeros(response_mask.shape, dtype=scores.dtype, device=scores.device)
    rewards[rows[last], columns[last]] = scores[owners[last]]
    return rewards


def _in_order(owners: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """For action tokens in batch order: their trajectories, their numbers within them; and each one's tokens [N]."""
    lengths = torch.bincount(owners, minlength=count)
    order = torch.argsort(owners, stable=True)
    begins = lengths.cumsum(0) - lengths
    places = torch.empty_like(owners)
    places[order] = torch.arange(len(owners), device=owners.device) - begins[owners[order]]
    return owners, places, lengths


def whiten_tokens(advantages: Tensor, mask: Tensor, population: Tensor) -> Tensor:
    """(A - mean) / sqrt(variance + 1e-8) where `mask`, 0 elsewhere; mean and variance (n - 1) are of `population`.

    What is outside of the population is divided by the deviation of all that is in `mask`: it can't move the
    population, and nearly equal advantages there can't blow it up. What is all equal is exactly 0.
    """
    if not bool(population.any()):
        return torch.zeros_like(advantages)
    values = advantages.double()
    mean = _mean(values[population])
    scale = torch.where(population, _deviation(values[population]), _deviation(values[mask]))
    return torch.where(mask, (values - mean) / scale, 0.0).to(advantages.dtype)


def _mean(values: Tensor) -> Tensor:
    """Of equal values exactly their value: rounding must not become a signal."""
    return values[0] if bool((values == values[:1]).all()) else values.mean()


def _deviation(values: Tensor) -> Tensor:
    variance = values.var() if len(values) > 1 else values.new_zeros(())
    return (variance + WHITENING_EPSILON).sqrt()


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, mask: Tensor, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Losses [B, T], reward units squared, and bool where the clip range decided them; 0 and False outside the mask.

    0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), c = `value_clip`; None: 0.5 (V - R)^2.

    PPO's clipped value loss with the factor 1/2 (Schulman et al. 2017's code; so do verl and TRL): the gradient of an
    unclipped token is V - R. Raises ValueError if old values or returns require grad.
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
    """1 - Var(R - V) / Var(R) of [n] values and returns: 1 is perfect, 0 no better than a constant, negative worse.

    None where returns don't vary.
    """
    if len(returns) < 2:
        return None
    spread = float(returns.double().var(correction=0))
    return None if spread == 0.0 else 1.0 - float((returns.double() - values.double()).var(correction=0)) / spread
