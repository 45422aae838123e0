"""What an algorithm says of itself: records without torch, which configuration, workers and docs read."""

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
    """What it earned in all, less what a KL penalty takes off."""
    num_action_tokens: int = 1
    group: str = ""
    """Fresh members of one group have one name; a replayed one's is that of the group it was collected in."""
    task: str = ""
    replayed: bool = False
    greedy_reward: float = math.nan
    """Reward of one greedy episode on its task; NaN: unknown."""
    turn_rewards: tuple[float, ...] | None = None
    """What each of its replies earned by itself; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One value of `algorithm`: how a trajectory gets its advantage, and which settings that goes with."""

    name: str
    paper: str
    formula: str
    """The advantage, for docs/algorithms.md; r is the reward."""
    no_signal: str
    """When the advantage is exactly 0, so that nothing is learned."""
    remark: str = ""
    """How this differs from the paper, or what to set."""

    compares: Literal["group", "batch", "nothing", "critic"]
    """A trajectory is compared with its group, with all of the batch, with no other, or with what a critic says."""
    baseline: Callable[[Sequence[Member]], float] | None = None
    """What a reward is measured by, of the members it is compared with (group, batch)."""
    advantage_of: Callable[[Member], float] | None = None
    """The advantage of a member by itself (nothing)."""
    leaves_itself_out: bool = False
    """A member is not among those that it is compared with."""
    divides: bool = False
    """The distance from the baseline is divided by the deviation of those compared and the member itself."""
    whitens: bool = False
    """What comes out is whitened over the whole batch."""

    std_is_optional: bool = False
    """`advantage.normalise_std: false` leaves the division out."""
    without_std: str | None = None
    """The algorithm that is this one without the division."""
    stored_as: str | None = None
    """The algorithm that rows are stored with, where the advantages trained with are made later; samplers read them."""
    credits: tuple[str, ...] = ("trajectory", "turn", "state")
    """Values of `advantage.credit` it goes with."""
    several_agents: bool = True
    """Agents of one episode may have rewards of their own."""
    greedy_episodes: bool = False
    """It needs one greedy episode per task."""

    @property
    def needs_critic(self) -> bool:
        return self.compares == "critic"

    @property
    def compares_members(self) -> bool:
        """Other trajectories say what a reward is measured by: replayed members can be among them."""
        return self.compares in ("group", "batch")

    @property
    def skips_equal_groups(self) -> bool:
        """A group of equal rewards teaches nothing, and can be replaced."""
        return self.compares == "group" and not self.whitens


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One value of `loss.<stream>.objective`: its loss, and what a pass over some of the rows must know of it."""

    name: str
    paper: str
    formula: str
    """The loss of a token, for docs/algorithms.md, in the letters of that page."""
    function: Callable[..., PolicyLoss]
    """Takes an `ObjectiveInput`; its keyword arguments are the options, with their types and defaults."""
    replay_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options whose default is another one for the replay stream."""
    whole_trajectories: bool = False
    """A token's loss depends on all rows of its trajectory: they must be in one pass."""
    needs_advantage: bool = True
    """Where the advantage is 0 there is neither loss nor gradient: such rows can be left out."""
    has_ratio: bool = True
    """False: its anchor is a denominator of nothing but the metrics."""
    bounded: bool = True
    """Something in it bounds how far an update goes from the policy that sampled."""
    anchor: str | None = None
    """The anchor that it must have; None: any."""
    replaces_missing: bool = False
    """It can be trained on tokens of unknown behavior log-probs: a value of `loss.<stream>.missing_log_probs`."""

    @property
    def options(self) -> dict[str, tuple[Any, Any]]:
        """The type and the default of each option."""
        _, *parameters = inspect.signature(self.function, eval_str=True).parameters.values()
        return {each.name: (each.annotation, each.default) for each in parameters}
