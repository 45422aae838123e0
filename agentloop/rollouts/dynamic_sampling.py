"""Dynamic sampling: groups without a signal are replaced by groups of further tasks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from agentloop.rollouts.trajectories import Collected
from replay.records import GroupRecord, Trajectory

Round = Callable[[Sequence[int], Sequence[Collected]], Collected]
"""Collects one group of each of these sizes, of tasks that no earlier round had; is given those rounds."""


def zero_variance_groups(fresh: Collected) -> list[tuple[GroupRecord, list[Trajectory]]]:
    """Groups whose members have one reward before a KL penalty, and no advantage over each other but by the penalty."""
    members = _members(fresh)
    return [
        (group, members[group.id])
        for group in fresh.groups
        if len({row.record.reward for row in members[group.id]}) == 1
        and (
            any(fresh.kl_penalties[row.id].amount for row in members[group.id])
            or not any(_has_advantage(row) for row in members[group.id])
        )
    ]


def _has_advantage(row: Trajectory) -> bool:
    """Itself, or one of its agents."""
    return row.record.advantage != 0 or any(advantage for _, advantage in row.record.rewards_by_agent.values())


def sample_dynamically(first: Collected, collect_round: Round, *, rounds: int) -> Collected:
    """`first` with its zero-variance groups of several replaced, in at most `rounds` further rounds.

    Each round collects as many groups as there are still to replace, of the same sizes; what is left after the last
    one stays, so the batch keeps its size. DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476), with a bound.
    """
    collected = [first]
    to_replace = [group.id for group, members in zero_variance_groups(first) if len(members) > 1]
    replaced: dict[str, GroupRecord] = {}
    unused: list[GroupRecord] = []
    found = len(to_replace)
    sizes = {group.id: group.size for group in first.groups}
    while to_replace and len(collected) <= rounds:
        newer = collect_round([sizes[id] for id in to_replace], collected)
        collected.append(newer)
        without_signal = {group.id for group, _ in zero_variance_groups(newer)}
        with_signal = [group for group in newer.groups if group.id not in without_signal]
        replaced |= dict(zip(to_replace, with_signal, strict=False))
        unused += [group for group in newer.groups if group.id in without_signal]
        to_replace = to_replace[len(with_signal) :]
    counts = {
        "rollout/dynamic_sampling_rounds": len(collected) - 1,
        "rollout/zero_variance_groups": found,
        "rollout/replaced_groups": len(replaced),
        "rollout/zero_variance_groups_left": len(to_replace),
    }
    return _joined(collected, replaced, unused, {name: float(count) for name, count in counts.items()})


def _joined(
    collected: Sequence[Collected],
    replaced: dict[str, GroupRecord],
    unused: list[GroupRecord],
    counts: dict[str, float],
) -> Collected:
    first = collected[0]
    members = {id: rows for round in collected for id, rows in _members(round).items()}
    groups = [replaced.get(group.id, group) for group in first.groups]
    unused = [*(group for group in first.groups if group.id in replaced), *unused]
    return Collected(
        tasks=[task for round in collected for task in round.tasks],
        groups=groups,
        trajectories=[row for group in groups for row in members[group.id]],
        rewrites=sum((round.rewrites for round in collected), Counter()),
        engine_failures=sum(round.engine_failures for round in collected),
        rewards={id: value for round in collected for id, value in round.rewards.items()},
        kl_penalties={id: penalty for round in collected for id, penalty in round.kl_penalties.items()},
        extra_metrics=_mean_metrics(collected) | counts,
        unused_groups=unused,
        unused=[row for group in unused for row in members[group.id]],
        further_tasks=tuple(index for round in collected for index in round.further_tasks),
    )


def _mean_metrics(collected: Sequence[Collected]) -> dict[str, float]:
    """The rounds' extra metrics, each round weighing by its rows; counts of failures add up."""
    parts = defaultdict(list)
    for round in collected:
        for name, value in round.extra_metrics.items():
            parts[name].append((value, len(round.trajectories)))
    return {
        name: sum(value for value, _ in given)
        if name.endswith("_failures")
        else sum(value * rows for value, rows in given) / sum(rows for _, rows in given)
        for name, given in parts.items()
    }


def _members(fresh: Collected) -> dict[str, list[Trajectory]]:
    members = defaultdict(list)
    for row in fresh.trajectories:
        members[row.record.group].append(row)
    return members
