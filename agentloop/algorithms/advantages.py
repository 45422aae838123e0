"""Computes advantages from members that are compared with each other.

Importing this module must not import torch (see `catalog.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

from agentloop.algorithms.declarations import Algorithm, Member

ReplayBaseline = Literal["stored", "shared", "split", "fresh_only"]
STD_EPSILON = 1e-6
"""Added to a deviation before something is divided by it."""
WHITENING_EPSILON = 1e-8
"""Added to a variance before something is divided by its root. A deviation below 1e-4 is rounding, and is damped."""


def mean_reward(members: Sequence[Member]) -> float:
    return _exact_mean([member.reward for member in members])


def _exact_mean(values: Sequence[float]) -> float:
    """Compute the mean. The mean of equal values is exactly their value: rounding must not become a signal."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    """Compute the sample variance (n - 1), which is exactly 0 for equal values and for a single one."""
    mean = _exact_mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)


def advantages_for_members(
    members: Sequence[Member], replay_baseline: ReplayBaseline, algorithm: Algorithm
) -> list[float]:
    """Compute each member's advantage: (reward - baseline) / scale. If the algorithm `whitens`, the batch is whitened.

    The baseline comes from the compared members. If the algorithm `divides`, the scale is 1e-6 plus the deviation of
    the compared members *and* the member itself, so that nearly equal rewards can't make it huge. Otherwise it is 1.

    A member that is compared with nobody, or only with itself, has advantage exactly 0. All trajectories have the same
    weight, whatever their number of tokens; only the baseline of `opo` weighs them. Raises ValueError for a reward that
    is not finite.
    """
    for position, member in enumerate(members):
        if not math.isfinite(member.reward):
            raise ValueError(f"rewards[{position}] must be finite, got {member.reward}. Check its reward.")
    if algorithm.advantage_of is not None:
        return [algorithm.advantage_of(member) for member in members]
    measure = algorithm.baseline
    assert measure is not None, "an algorithm that compares members has a baseline"
    compared = compared_members(members, replay_baseline, whole_batch=algorithm.compares == "batch")
    baseline = cache(lambda positions: measure([members[p] for p in positions]))
    variance = cache(lambda positions: _variance([members[p].reward for p in positions]))
    result = []
    for position, member in enumerate(members):
        others = tuple(p for p in compared[position] if not (algorithm.leaves_itself_out and p == position))
        apart = member.reward - baseline(others) if others else 0.0
        scale = math.sqrt(variance(_with(position, others))) + STD_EPSILON if algorithm.divides else 1.0
        result.append(apart / scale)
    if algorithm.whitens:
        return whiten_members(result, compared_members(members, replay_baseline, whole_batch=True))
    return result


def _with(position: int, others: tuple[int, ...]) -> tuple[int, ...]:
    return others if position in others else tuple(sorted((*others, position)))


def whiten_members(values: Sequence[float], compared: Sequence[Sequence[int]]) -> list[float]:
    """Whiten advantages: (A - mean) / sqrt(variance + 1e-8).

    The mean is over the members that `compared` names, the variance (n - 1) over them and the member itself. An
    advantage of exactly 0 stays 0. The mean of the others is 0 but for rounding, which must not become a signal.
    """
    mean = cache(lambda positions: _exact_mean([values[p] for p in positions]))
    variance = cache(lambda positions: _variance([values[p] for p in positions]))
    result = []
    for position, (value, others) in enumerate(zip(values, map(tuple, compared), strict=True)):
        measured = value != 0.0 and bool(others)
        scale = math.sqrt(variance(_with(position, others)) + WHITENING_EPSILON)
        result.append((value - mean(others)) / scale if measured else 0.0)
    return result


def normalise_batch(
    values: Sequence[float], fresh: Sequence[bool], *, centre: bool, zero_is_measured: bool
) -> list[float]:
    """Normalise values A over the batch: (A - m) / sqrt(sum((A - m)^2) / (n - 1) + 1e-8).

    m is the mean of the fresh rows with `centre`, else 0. For a fresh row the sum is over the n fresh rows, for a
    replayed row over all n rows: replayed rows may be a selection, so they must not change fresh rows. No result is
    beyond sqrt(n - 1). Unless `zero_is_measured`, a value of exactly 0 means a group without a signal: it stays 0, and
    counts in no mean or sum.
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


def compared_members(
    members: Sequence[Member], baseline: ReplayBaseline, *, whole_batch: bool
) -> list[tuple[int, ...]]:
    """Find the positions of the members that each member is compared with.

    - stored: fresh members with their group; replayed members with nobody, as they keep their stored advantage
    - split: as `stored`, but replayed members of a task with each other (RePO, Li et al. 2025, arXiv 2506.09340)
    - fresh_only: as `stored`, but replayed members with the fresh members of their task
    - shared: all members of a task with each other

    With `whole_batch` the batch counts as one task, and its fresh members as one group. Nobody is compared with a
    member without action tokens, because the policy did not earn its reward (OpenRLHF does the same).
    """
    same_task: dict[str, list[int]] = {}
    same_group: dict[tuple[str, str], list[int]] = {}
    for position, member in enumerate(members):
        if not member.num_action_tokens:
            continue
        task, group = _task_and_group(member, whole_batch)
        same_task.setdefault(task, []).append(position)
        if not member.replayed:
            same_group.setdefault((task, group), []).append(position)
    compared: list[tuple[int, ...]] = []
    for member in members:
        task, group = _task_and_group(member, whole_batch)
        if baseline == "shared":
            compared.append(tuple(same_task.get(task, ())))
        elif not member.replayed:
            compared.append(tuple(same_group.get((task, group), ())))
        elif baseline == "stored":
            compared.append(())
        else:
            compared.append(tuple(p for p in same_task.get(task, ()) if members[p].replayed == (baseline == "split")))
    return compared


def _task_and_group(member: Member, whole_batch: bool) -> tuple[str, str]:
    return ("", "") if whole_batch else (member.task, member.group)
