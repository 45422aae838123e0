"""Advantages of whole trajectories: what each earned over a baseline, by a rule with a name."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

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
class Rule:
    """One way to compare a trajectory with others."""

    baseline: Callable[[Sequence[Member]], float]
    """What a reward is measured by, of at least one member."""
    compares: Literal["group", "batch", "nothing"]
    """Whom a trajectory is compared with: its group, all of the batch, or nobody (`of_itself`)."""
    leaves_itself_out: bool = False
    divides: bool = False
    """By the deviation of those it is compared with and its own reward."""
    whitens: bool = False
    """What comes out is whitened over the whole batch."""
    of_itself: Callable[[Member], float] | None = None
    """The advantage of a member by itself, where it is compared with nobody."""


def _mean(members: Sequence[Member]) -> float:
    return _exact_mean([member.reward for member in members])


def _exact_mean(values: Sequence[float]) -> float:
    """The mean; of equal values exactly their value, for rounding must not become a signal."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    """The sample variance (n - 1); of equal values, or of one, exactly 0."""
    mean = _exact_mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)


def length_weighted_mean(members: Sequence[Member]) -> float:
    """sum(L r) / sum(L), L in action tokens: the baseline of least variance, if |grad log pi|^2 grows with L (OPO, Hao
    et al. 2025, arXiv 2505.23585)."""
    rewards = [member.reward for member in members]
    lengths = [member.num_action_tokens for member in members]
    if max(rewards) == min(rewards) or sum(lengths) == 0:
        return rewards[0]
    return math.fsum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)


def _over_greedy(member: Member) -> float:
    """r - r(greedy) (ReMax, Li et al. 2023, arXiv 2310.10505); 0 where the greedy reward is unknown."""
    return 0.0 if math.isnan(member.greedy_reward) else member.reward - member.greedy_reward


RULES: Mapping[str, Rule] = {
    # Shao et al. 2024, arXiv 2402.03300: (r - mean) / (std + 1e-6).
    "grpo": Rule(_mean, "group", divides=True),
    # Liu et al. 2025, arXiv 2503.20783.
    "dr_grpo": Rule(_mean, "group"),
    # Ahmadian et al. 2024, arXiv 2402.14740.
    "rloo": Rule(_mean, "group", leaves_itself_out=True),
    "opo": Rule(length_weighted_mean, "group"),
    # Hu 2025, arXiv 2501.03262: one mean and one deviation for all tasks.
    "reinforce++": Rule(_mean, "batch", divides=True),
    # Its second form: the mean of the group, and one deviation for all tasks.
    "reinforce++_baseline": Rule(_mean, "group", whitens=True),
    # Williams 1992: no baseline.
    "reinforce": Rule(_mean, "nothing", of_itself=lambda member: member.reward),
    "remax": Rule(_mean, "nothing", of_itself=_over_greedy),
}


def rule_of(algorithm: str, *, normalise_std: bool) -> Rule:
    """The rule of an algorithm; `normalise_std: false` makes grpo's that of dr_grpo."""
    return RULES["dr_grpo" if algorithm == "grpo" and not normalise_std else algorithm]


def group_advantages(rewards: Sequence[float], normalise_std: bool) -> list[float]:
    """GRPO's, or Dr. GRPO's, of the members of one group by their rewards."""
    everyone = tuple(range(len(rewards)))
    rule = rule_of("grpo", normalise_std=normalise_std)
    return advantages([Member(reward) for reward in rewards], [everyone] * len(rewards), rule)


def advantages(members: Sequence[Member], compared: Sequence[Sequence[int]], rule: Rule) -> list[float]:
    """One per member: (reward - baseline) / scale; `compared[i]` are the positions of those that i is compared with.

    The baseline is that of the compared members. The scale is 1, or with `rule.divides` the deviation of the compared
    members *and* i, + 1e-6: those of N members are at most sqrt(N) apart, however nearly equal the others are.

    A member that is compared with nobody, or with itself alone, has exactly 0. Trajectories weigh the same, however
    many tokens or segments they have, but for opo, whose baseline weighs them. Raises ValueError for a reward
    that is not finite.
    """
    for position, member in enumerate(members):
        if not math.isfinite(member.reward):
            raise ValueError(f"rewards[{position}] must be finite, got {member.reward}. Check its reward.")
    if rule.of_itself is not None:
        return [rule.of_itself(member) for member in members]
    baseline = cache(lambda positions: rule.baseline([members[p] for p in positions]))
    variance = cache(lambda positions: _variance([members[p].reward for p in positions]))
    result = []
    for position, member in enumerate(members):
        others = tuple(p for p in compared[position] if not (rule.leaves_itself_out and p == position))
        apart = member.reward - baseline(others) if others else 0.0
        scale = math.sqrt(variance(_with(position, others))) + STD_EPSILON if rule.divides else 1.0
        result.append(apart / scale)
    return result


def _with(position: int, others: tuple[int, ...]) -> tuple[int, ...]:
    return others if position in others else tuple(sorted((*others, position)))


def whitened(values: Sequence[float], compared: Sequence[Sequence[int]]) -> list[float]:
    """(A - mean) / sqrt(variance + 1e-8) of advantages over a group; the mean is that of those at `compared`, the
    variance (n - 1) that of those and the member itself.

    A of exactly 0 stays exactly 0: group means leave a mean of 0, and only its rounding would make a signal of it.
    """
    mean = cache(lambda positions: _exact_mean([values[p] for p in positions]))
    variance = cache(lambda positions: _variance([values[p] for p in positions]))
    result = []
    for position, (value, others) in enumerate(zip(values, map(tuple, compared), strict=True)):
        measured = value != 0.0 and bool(others)
        scale = math.sqrt(variance(_with(position, others)) + WHITENING_EPSILON)
        result.append((value - mean(others)) / scale if measured else 0.0)
    return result


def normalised(values: Sequence[float], fresh: Sequence[bool], *, centre: bool, zero_is_measured: bool) -> list[float]:
    """(A - m) / sqrt(sum((A - m)^2) / (n - 1) + 1e-8), the sum over the fresh rows for a fresh row, else over all.

    m is the mean of the fresh rows with `centre`, else 0. Replayed rows may be a selection, whose own mean and spread
    say nothing of the policy: they move no fresh row, and none of n is beyond sqrt(n - 1), however nearly equal they
    are. Unless `zero_is_measured`, a value of exactly 0 is that of a group without a signal: it stays 0, and is in no
    figure.
    """
    measured = [zero_is_measured or value != 0.0 for value in values]
    known = [(value, is_fresh) for value, is_fresh, known in zip(values, fresh, measured, strict=True) if known]
    of_fresh = [value for value, is_fresh in known if is_fresh]
    mean = _exact_mean(of_fresh) if centre and of_fresh else 0.0
    scales = [_distance([value for value, _ in known], mean), _distance(of_fresh, mean)]
    rows = zip(values, fresh, measured, strict=True)
    return [(value - mean) / scales[is_fresh] if known else 0.0 for value, is_fresh, known in rows]


def _distance(values: Sequence[float], mean: float) -> float:
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1) + WHITENING_EPSILON)


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
    compared with its own. With `whole_batch` the batch is one task and its fresh members one group. Nobody is compared
    with a member without action tokens: the policy did not earn its reward (OpenRLHF does the same).
    """
    same_task: dict[str, list[int]] = {}
    same_group: dict[tuple[str, str], list[int]] = {}
    for position, member in enumerate(members):
        if not member.num_action_tokens:
            continue
        task, group = _names(member, whole_batch)
        same_task.setdefault(task, []).append(position)
        if not member.replayed:
            same_group.setdefault((task, group), []).append(position)
    compared: list[tuple[int, ...]] = []
    for position, member in enumerate(members):
        task, group = _names(member, whole_batch)
        if baseline == "shared":
            compared.append(tuple(same_task.get(task, ())))
        elif baseline == "leave_one_out":
            compared.append(tuple(p for p in same_task.get(task, ()) if p != position))
        elif not member.replayed:
            compared.append(tuple(same_group.get((task, group), ())))
        elif baseline == "stored":
            compared.append(())
        else:
            compared.append(tuple(p for p in same_task.get(task, ()) if members[p].replayed == (baseline == "split")))
    return compared


def _names(member: Member, whole_batch: bool) -> tuple[str, str]:
    return ("", "") if whole_batch else (member.task, member.group)
