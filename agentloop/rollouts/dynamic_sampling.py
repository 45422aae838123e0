"""Dynamic sampling: groups that tell nothing are replaced by groups of further tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from agentloop.rollouts.collect import Collected
from replay.records import GroupRecord, Trajectory

Round = Callable[[Sequence[int], Sequence[Collected]], Collected]
"""Collects one group of each of these sizes, of tasks that no earlier round had; is given those rounds."""


def flat_groups(fresh: Collected) -> list[tuple[GroupRecord, list[Trajectory]]]:
    """Groups whose members have one reward before a KL penalty, and so no advantage over each other but by it.

    An advantage function of the user's own may tell members of one reward apart: those with an advantage are not flat,
    unless it can be the penalty's.
    """
    members = _members(fresh)
    return [
        (group, members[group.id])
        for group in fresh.groups
        if len({row.record.reward for row in members[group.id]}) == 1
        and (
            any(fresh.charges[row.id].penalty for row in members[group.id])
            or not any(row.record.advantage for row in members[group.id])
        )
    ]


def recollect(first: Collected, collect_round: Round, *, rounds: int) -> Collected:
    """`first` with its groups of equal rewards replaced, in at most `rounds` further rounds.

    Each round collects as many groups as there are still to replace, of the same sizes; those that tell something
    take the places of groups that don't, which become spare: they are stored, and in no batch. What is left after the
    last round stays, so the batch keeps its size. A group of one is never replaced, as no other would tell more.

    DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476), with a bound.
    """
    collected = [first]
    silent = [group.id for group, members in flat_groups(first) if len(members) > 1]
    replaced: dict[str, GroupRecord] = {}
    spare: list[GroupRecord] = []
    found = len(silent)
    sizes = {group.id: group.size for group in first.groups}
    while silent and len(collected) <= rounds:
        newer = collect_round([sizes[id] for id in silent], collected)
        collected.append(newer)
        still_flat = {group.id for group, _ in flat_groups(newer)}
        telling = [group for group in newer.groups if group.id not in still_flat]
        replaced |= dict(zip(silent, telling, strict=False))
        spare += [group for group in newer.groups if group.id in still_flat]
        silent = silent[len(telling) :]
    return _joined(collected, replaced, spare, silent=len(silent), found=found)


def _joined(
    collected: Sequence[Collected],
    replaced: dict[str, GroupRecord],
    spare: list[GroupRecord],
    *,
    silent: int,
    found: int,
) -> Collected:
    first = collected[0]
    members = {id: rows for round in collected for id, rows in _members(round).items()}
    groups = [replaced.get(group.id, group) for group in first.groups]
    spare = [*(group for group in first.groups if group.id in replaced), *spare]
    counts = {
        "rollout/recollect_rounds": len(collected) - 1,
        "rollout/flat_groups": found,
        "rollout/replaced_groups": len(replaced),
        "rollout/flat_groups_left": silent,
    }
    return Collected(
        tasks=[task for round in collected for task in round.tasks],
        groups=groups,
        trajectories=[row for group in groups for row in members[group.id]],
        rewrites=sum((round.rewrites for round in collected), Counter()),
        engine_failures=sum(round.engine_failures for round in collected),
        worth={id: value for round in collected for id, value in round.worth.items()},
        charges={id: charge for round in collected for id, charge in round.charges.items()},
        told={**_mean_told(collected), **{name: float(count) for name, count in counts.items()}},
        spare_groups=spare,
        spare=[row for group in spare for row in members[group.id]],
        further_tasks=tuple(index for round in collected for index in round.further_tasks),
    )


def _mean_told(collected: Sequence[Collected]) -> dict[str, float]:
    """What the rounds told, each weighing by its rows; counts add up."""
    told: dict[str, float] = {}
    for name in dict.fromkeys(name for round in collected for name in round.told):
        parts = [(round.told[name], len(round.trajectories)) for round in collected if name in round.told]
        if name.endswith("_failures"):
            told[name] = sum(value for value, _ in parts)
        else:
            told[name] = sum(value * rows for value, rows in parts) / sum(rows for _, rows in parts)
    return told


def _members(fresh: Collected) -> dict[str, list[Trajectory]]:
    members: dict[str, list[Trajectory]] = {}
    for row in fresh.trajectories:
        members.setdefault(row.record.group, []).append(row)
    return members
