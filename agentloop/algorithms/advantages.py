"""Advantages of whole trajectories: what each earned over a baseline, by a rule with a name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a deviation that is divided by."""
WHITENING_EPSILON = 1e-8
"""Added to a variance whose root is divided by: a deviation below 1e-4 is damped, for it is rounding."""


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


@dataclass(frozen=True)
class Baseline:
    """What a reward is measured by: (reward - mean) / scale."""

    mean: float
    scale: float

    def of(self, reward: float) -> float:
        return (reward - self.mean) / self.scale


@dataclass(frozen=True)
class Rule:
    """One way to make a baseline of the members a trajectory is compared with."""

    baseline: Callable[[Sequence[Member]], Baseline]
    """The baseline of at least one member."""
    compares: Literal["group", "batch", "nothing"]
    """Whom a trajectory is compared with: its group, all of the batch, or nobody (`of_itself`)."""
    leaves_itself_out: bool = False
    divides: bool = False
    """By the deviation of those it is compared with."""
    whitens: bool = False
    """What comes out is whitened over the whole batch."""
    of_itself: Callable[[Member], float] | None = None
    """The advantage of a member by itself, where it is compared with nobody."""


def mean_baseline(members: Sequence[Member], *, normalise_std: bool) -> Baseline:
    """Mean, and sample standard deviation (n - 1) + 1e-6 if asked for, else 1.

    (r - mean) / (std + 1e-6) is GRPO (Shao et al. 2024, arXiv 2402.03300), r - mean is Dr. GRPO (Liu et al. 2025,
    arXiv 2503.20783). Of one member, or of equal rewards, the mean is exactly that reward and the scale 1: rounding
    in the mean must not become a signal.
    """
    rewards = [member.reward for member in members]
    if max(rewards) == min(rewards):
        return Baseline(rewards[0], 1.0)
    mean = math.fsum(rewards) / len(rewards)
    if not normalise_std:
        return Baseline(mean, 1.0)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return Baseline(mean, std + STD_EPSILON)


def group_advantages(rewards: Sequence[float], normalise_std: bool) -> list[float]:
    """GRPO's, or Dr. GRPO's, of the members of one group by their rewards."""
    baseline = mean_baseline([Member(reward) for reward in rewards], normalise_std=normalise_std)
    return [baseline.of(reward) for reward in rewards]


def length_weighted_baseline(members: Sequence[Member]) -> Baseline:
    """sum(L r) / sum(L), L in action tokens; scale 1 (OPO, Hao et al. 2025, arXiv 2505.23585)."""
    rewards = [member.reward for member in members]
    lengths = [member.num_action_tokens for member in members]
    if max(rewards) == min(rewards) or sum(lengths) == 0:
        return Baseline(rewards[0], 1.0)
    return Baseline(math.fsum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths), 1.0)


def _over_greedy(member: Member) -> float:
    """r - r(greedy) (ReMax, Li et al. 2023, arXiv 2310.10505); 0 where the greedy reward is unknown."""
    return 0.0 if math.isnan(member.greedy_reward) else member.reward - member.greedy_reward


def _mean(members: Sequence[Member]) -> Baseline:
    return mean_baseline(members, normalise_std=False)


def _standardised(members: Sequence[Member]) -> Baseline:
    return mean_baseline(members, normalise_std=True)


RULES: Mapping[str, Rule] = {
    "grpo": Rule(_standardised, "group", divides=True),
    "dr_grpo": Rule(_mean, "group"),
    # Ahmadian et al. 2024, arXiv 2402.14740.
    "rloo": Rule(_mean, "group", leaves_itself_out=True),
    "opo": Rule(length_weighted_baseline, "group"),
    # Hu 2025, arXiv 2501.03262: one mean and one deviation for all tasks.
    "reinforce++": Rule(_standardised, "batch", divides=True),
    # Its second form: the mean of the group, and one deviation for all tasks.
    "reinforce++_baseline": Rule(_mean, "group", whitens=True),
    # Williams 1992: no baseline.
    "reinforce": Rule(_mean, "nothing", of_itself=lambda member: member.reward),
    "remax": Rule(_mean, "nothing", of_itself=_over_greedy),
}


def rule_of(algorithm: str, *, normalise_std: bool) -> Rule:
    """The rule of an algorithm; `normalise_std: false` makes grpo's that of dr_grpo."""
    return RULES["dr_grpo" if algorithm == "grpo" and not normalise_std else algorithm]


def advantages(members: Sequence[Member], compared: Sequence[Sequence[int]], rule: Rule) -> list[float]:
    """One per member; `compared[i]` are the positions of the members that i is compared with.

    A member that is compared with nobody, or with itself alone, has exactly 0. Trajectories weigh the same, however
    many tokens or segments they have, but for OPO, whose baseline weighs by length. Raises ValueError for a reward
    that is not finite.
    """
    for position, member in enumerate(members):
        if not math.isfinite(member.reward):
            raise ValueError(
                f"rewards[{position}] must be finite, got {member.reward}. Check the environment's reward."
            )
    if rule.of_itself is not None:
        return [rule.of_itself(member) for member in members]
    made: dict[tuple[int, ...], Baseline] = {}
    result = []
    for position, member in enumerate(members):
        others = tuple(p for p in compared[position] if not (rule.leaves_itself_out and p == position))
        if not others:
            result.append(0.0)
            continue
        if others not in made:
            made[others] = rule.baseline([members[p] for p in others])
        result.append(made[others].of(member.reward))
    return result


def whitened(values: Sequence[float], compared: Sequence[Sequence[int]]) -> list[float]:
    """(A - mean) / sqrt(variance + 1e-8) of advantages over a group; mean and variance (n - 1) of those at `compared`.

    A of exactly 0 stays exactly 0: group means leave a mean of 0, and only its rounding would make a signal of it.
    """
    made: dict[tuple[int, ...], Baseline] = {}
    result = []
    for value, positions in zip(values, map(tuple, compared), strict=True):
        if positions not in made:
            made[positions] = _whitening([values[p] for p in positions])
        result.append(made[positions].of(value) if value != 0.0 else 0.0)
    return result


def normalised(values: Sequence[float], *, centre: bool, zero_is_measured: bool) -> list[float]:
    """Divided by sqrt(variance + 1e-8), variance with n - 1; with `centre` less their mean first.

    Unless `zero_is_measured`, a value of exactly 0 is that of a group without a signal: it stays 0, and is in neither
    mean nor variance. Where fewer than two values are left, or equal ones, nothing is compared: with `centre` all are
    0, else they stay as they are.
    """
    known = [value for value in values if zero_is_measured or value != 0.0]
    baseline = _whitening(known)
    if not centre:
        baseline = Baseline(0.0, baseline.scale if math.isfinite(baseline.scale) else 1.0)
    return [baseline.of(value) if zero_is_measured or value != 0.0 else 0.0 for value in values]


def _whitening(values: Sequence[float]) -> Baseline:
    """Mean and deviation; with fewer than two different values the scale is infinite, so that all come out as 0."""
    if len(set(values)) < 2:
        return Baseline(0.0, math.inf)
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Baseline(mean, math.sqrt(variance + WHITENING_EPSILON))


def returns(advantages: Tensor, values: Tensor) -> Tensor:
    """What a critic regresses on: advantages + values; reward units."""
    return advantages + values


ReplayBaseline = Literal["stored", "shared", "split", "fresh_only", "leave_one_out"]


def compared_members(
    members: Sequence[Member], baseline: ReplayBaseline, *, whole_batch: bool
) -> list[tuple[int, ...]]:
    """Positions of the members that each member is compared with; none for a replayed one under `stored`.

    - stored: fresh members with their group; a replayed row keeps the advantage it was collected with
    - split: besides, replayed members of a task with each other (RePO's split, Li et al. 2025, arXiv 2506.09340)
    - fresh_only: replayed members with the fresh ones of their task
    - shared: all members of a task with each other
    - leave_one_out: likewise, each without itself

    A task's fresh members can be several groups; under `stored`, `split` and `fresh_only` each fresh member is
    compared with its own. With `whole_batch` the batch is one task and its fresh members one group.
    """
    same_task: dict[str, list[int]] = {}
    same_group: dict[tuple[str, str], list[int]] = {}
    for position, member in enumerate(members):
        task, group = _names(member, whole_batch)
        same_task.setdefault(task, []).append(position)
        if not member.replayed:
            same_group.setdefault((task, group), []).append(position)
    compared: list[tuple[int, ...]] = []
    for position, member in enumerate(members):
        task, group = _names(member, whole_batch)
        if baseline == "shared":
            compared.append(tuple(same_task[task]))
        elif baseline == "leave_one_out":
            compared.append(tuple(p for p in same_task[task] if p != position))
        elif not member.replayed:
            compared.append(tuple(same_group[task, group]))
        elif baseline == "stored":
            compared.append(())
        else:
            compared.append(tuple(p for p in same_task[task] if members[p].replayed == (baseline == "split")))
    return compared


def _names(member: Member, whole_batch: bool) -> tuple[str, str]:
    return ("", "") if whole_batch else (member.task, member.group)
