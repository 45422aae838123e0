"""Dynamic sampling replaces groups without a learning signal by groups of further tasks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from agentloop.rollouts.trajectories import Collected
from replay.records import GroupRecord, Trajectory

Round = Callable[[Sequence[int], Sequence[Collected]], Collected]
"""Collects one group of each of these sizes, on tasks that none of the given earlier rounds had."""


def zero_variance_groups(fresh: Collected) -> list[tuple[GroupRecord, list[Trajectory]]]:
    """Find groups whose members have equal rewards without the KL penalty, and no advantage except through it."""
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
    """True if the row or one of its agents has an advantage."""
    return row.record.advantage != 0 or any(advantage for _, advantage in row.record.rewards_by_agent.values())


def sample_dynamically(first: Collected, collect_round: Round, *, rounds: int) -> Collected:
    """Replace the zero-variance groups of `first` that have several members, in at most `rounds` further rounds.

    Each round collects a group of the same size for each group that still has to be replaced. Groups that remain after
    the last round stay, so the batch keeps its size. DAPO (Yu et al. 2025, arXiv 2503.14476) has no bound of rounds.
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
        not_judged=sum(round.not_judged for round in collected),
        rewards={id: value for round in collected for id, value in round.rewards.items()},
        kl_penalties={id: penalty for round in collected for id, penalty in round.kl_penalties.items()},
        extra_metrics=_mean_metrics(collected) | counts,
        unused_groups=unused,
        unused=[row for group in unused for row in members[group.id]],
        further_tasks=tuple(index for round in collected for index in round.further_tasks),
    )


def _mean_metrics(collected: Sequence[Collected]) -> dict[str, float]:
    """Average the rounds' extra metrics, weighted by rows; counts of failures, and what users took, are added up."""
    parts = defaultdict(list)
    for round in collected:
        for name, value in round.extra_metrics.items():
            parts[name].append((value, len(round.trajectories)))
    return {
        name: sum(value for value, _ in given)
        if name.endswith("_failures") or name.startswith("user/")
        else sum(value * rows for value, rows in given) / sum(rows for _, rows in given)
        for name, given in parts.items()
    }


def _members(fresh: Collected) -> dict[str, list[Trajectory]]:
    members = defaultdict(list)
    for row in fresh.trajectories:
        members[row.record.group].append(row)
    return members
