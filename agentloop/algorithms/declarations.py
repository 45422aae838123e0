"""The records by which an algorithm describes itself. Configuration, workers and docs read them without torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

if TYPE_CHECKING:
    from agentloop.algorithms.objective_input import PolicyLoss

# What an option of an objective may be.
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
AtLeastZero = Annotated[float, Field(ge=0.0)]
AboveZero = Annotated[float, Field(gt=0.0)]
AboveOne = Annotated[float, Field(gt=1.0)]


@dataclass(frozen=True)
class Member:
    """One trajectory, as a baseline sees it."""

    reward: float
    """The reward of the whole trajectory, less the KL penalty."""
    num_action_tokens: int = 1
    group: str = ""
    """The group that it was collected in."""
    task: str = ""
    replayed: bool = False
    greedy_reward: float = math.nan
    """Reward of one greedy episode on its task; NaN: unknown."""
    turn_rewards: tuple[float, ...] | None = None
    """The reward of each reply by itself; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One value of `algorithm`: how a trajectory gets its advantage, and which settings go with it."""

    name: str
    paper: str
    formula: str
    """The advantage, for docs/algorithms.md; r is the reward."""
    no_signal: str
    """When the advantage is exactly 0, so that nothing is learned."""
    remark: str = ""
    """How this differs from the paper, or what to set."""

    compares: Literal["group", "batch", "nothing", "critic"]
    """A trajectory is compared with its group, with the whole batch, with no other, or with a critic's values."""
    baseline: Callable[[Sequence[Member]], float] | None = None
    """Computes what is subtracted from a reward, from the compared members (`group` and `batch`)."""
    advantage_of: Callable[[Member], float] | None = None
    """Computes the advantage of a member that is not compared (`nothing`)."""
    leaves_itself_out: bool = False
    """A member is not compared with itself."""
    divides: bool = False
    """The distance from the baseline is divided by the deviation of the compared members and the member itself."""
    whitens: bool = False
    """The results are whitened over the whole batch."""

    stored_as: str | None = None
    """The algorithm of the stored advantages, which samplers read, if those of the training are computed later."""
    credits_turns: bool = True
    """It goes with `advantage.credit: turn`."""
    several_agents: bool = True
    """Agents of one episode may have rewards of their own."""
    greedy_episodes: bool = False
    """It needs one greedy episode per task."""

    @property
    def needs_critic(self) -> bool:
        return self.compares == "critic"

    @property
    def compares_members(self) -> bool:
        """True if a reward is compared with those of other trajectories, which may be replayed ones."""
        return self.compares in ("group", "batch")

    @property
    def skips_equal_groups(self) -> bool:
        """True if a group of equal rewards teaches nothing, so that it can be replaced."""
        return self.compares == "group" and not self.whitens


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One value of `loss.<stream>.objective`: its loss, and what else training must know about it."""

    name: str
    paper: str
    formula: str
    """The loss of a token, for docs/algorithms.md, in the letters of that page."""
    function: Callable[..., PolicyLoss]
    """Takes an `ObjectiveInput`; its keyword arguments are the options, with their types and defaults."""
    replay_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The options that have another default in the replay stream, with this default."""
    whole_trajectories: bool = False
    """A token's loss depends on all rows of its trajectory, so they must be in one pass."""
    needs_advantage: bool = True
    """A token of advantage 0 has no loss and no gradient, so rows without an advantage can be left out."""
    has_ratio: bool = True
    """False: the loss has no ratio, so only metrics use the anchor."""
    bounded: bool = True
    """The loss limits how far an update moves away from the policy that sampled."""
    anchor: str | None = None
    """The only anchor that it allows; None: any."""
    replaces_missing: bool = False
    """It can train tokens with unknown behavior log-probs, so it is a value of `loss.<stream>.missing_log_probs`."""

    @property
    def options(self) -> dict[str, tuple[Any, Any]]:
        """The type and the default of each option."""
        _, *parameters = inspect.signature(self.function, eval_str=True).parameters.values()
        return {each.name: (each.annotation, each.default) for each in parameters}
