"""What a token's loss is: one function per objective, by name; any of them for either stream.

Every one takes an `ObjectiveInput` and its own options, and gives a `PolicyLoss`: exactly 0, with a gradient of exactly
0, outside the loss mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentloop.algorithms.objectives.objective import Objective, ObjectiveInput, PolicyLoss
from agentloop.algorithms.objectives.score import bc, gpg, reinforce, topr
from agentloop.algorithms.objectives.sequence_level import gmpo, gspo
from agentloop.algorithms.objectives.soft import exgrpo, luffy, sapo
from agentloop.algorithms.objectives.token_level import cispo, dppo_kl, dppo_tv, ppo_clip, surrogate

__all__ = ["OBJECTIVES", "Objective", "ObjectiveInput", "ObjectiveKind", "PolicyLoss"]


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
