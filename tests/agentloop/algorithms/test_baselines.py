"""Fresh and replayed members of a task: who is compared with whom, and what comes of it."""

import itertools
import math

import numpy as np
import pytest

from agentloop.algorithms.advantages import RULES, Member, ReplayBaseline, advantages, compared_members

FRESH = [Member(reward, group="g", task="a") for reward in (1.0, 0.0, 0.0, 1.0)]
REPLAYED = [Member(reward, group=f"old{reward}", task="a", replayed=True) for reward in (1.0, 0.25)]
OTHER = Member(1.0, group="h", task="b")


def measured(members: list[Member], baseline: ReplayBaseline, algorithm: str = "dr_grpo") -> list[float]:
    rule = RULES[algorithm]
    return advantages(members, compared_members(members, baseline, whole_batch=rule.compares == "batch"), rule)


@pytest.mark.parametrize(
    ("baseline", "fresh", "replayed"),
    [
        # mean of the fresh (1 + 0 + 0 + 1) / 4 = 0.5
        ("stored", [0.5, -0.5, -0.5, 0.5], [0.0, 0.0]),
        # of the replayed (1 + 0.25) / 2 = 0.625
        ("split", [0.5, -0.5, -0.5, 0.5], [0.375, -0.375]),
        ("fresh_only", [0.5, -0.5, -0.5, 0.5], [0.5, -0.25]),
        # of all six 3.25 / 6
        ("shared", [1 - 3.25 / 6, -3.25 / 6, -3.25 / 6, 1 - 3.25 / 6], [1 - 3.25 / 6, 0.25 - 3.25 / 6]),
        # of the other five: 3.25 - 1 = 2.25, 3.25 - 0 = 3.25, 3.25 - 0.25 = 3
        ("leave_one_out", [1 - 2.25 / 5, -3.25 / 5, -3.25 / 5, 1 - 2.25 / 5], [1 - 2.25 / 5, 0.25 - 3 / 5]),
    ],
)
def test_baseline_compares_with_whom_it_names(
    baseline: ReplayBaseline, fresh: list[float], replayed: list[float]
) -> None:
    given = measured([*FRESH, *REPLAYED, OTHER], baseline)
    assert given == pytest.approx([*fresh, *replayed, 0.0], abs=1e-15)


def test_deviation_is_that_of_those_one_is_compared_with() -> None:
    # Fresh only: mean 0.5, sample std sqrt(1/3). Of the others of a replayed 1: 1, 0, 0, 1, 0.25.
    scale = math.sqrt(1 / 3) + 1e-6
    assert measured([*FRESH, *REPLAYED], "fresh_only", "grpo")[4:] == pytest.approx([0.5 / scale, -0.25 / scale])
    others = np.float64([1, 0, 0, 1, 0.25])
    expected = (1 - others.mean()) / (others.std(ddof=1) + 1e-6)
    assert measured([*FRESH, *REPLAYED], "leave_one_out", "grpo")[4] == pytest.approx(expected, rel=1e-9)


def test_deviation_of_equal_rewards_or_of_one_is_left_out() -> None:
    """A replayed success among fresh failures is worth its distance to them, not a millionfold of it."""
    failures = [Member(0.0, group="g", task="a")] * 3
    success = Member(1.0, group="old", task="a", replayed=True)
    assert measured([*failures, success], "fresh_only", "grpo") == [0.0, 0.0, 0.0, 1.0]
    assert measured([failures[0], success], "leave_one_out", "grpo") == [-1.0, 1.0]
    # The others of the success are all 0; those of a failure are 0, 0, 1: mean 1/3, sample std sqrt(1/3).
    low = -1 / 3 / (math.sqrt(1 / 3) + 1e-6)
    assert measured([*failures, success], "leave_one_out", "grpo") == pytest.approx([low, low, low, 1.0])


@pytest.mark.parametrize("baseline", ["stored", "split", "fresh_only", "shared", "leave_one_out"])
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "opo"])
def test_degenerate_members_have_exactly_zero(algorithm: str, baseline: ReplayBaseline) -> None:
    same = [Member(0.3, 7 + i, group="g", task="a", replayed=i > 3) for i in range(7)]
    assert measured(same, baseline, algorithm) == [0.0] * 7
    assert measured([same[0]], baseline, algorithm) == [0.0]
    assert measured([same[6]], baseline, algorithm) == [0.0]


def test_groups_of_one_task_stay_apart_but_where_all_are_compared() -> None:
    first = [Member(reward, group="g1", task="a") for reward in (1.0, 0.0)]
    second = [Member(reward, group="g2", task="a") for reward in (1.0, 1.0)]
    for baseline in ("stored", "split", "fresh_only"):
        assert measured([*first, *second], baseline) == [0.5, -0.5, 0.0, 0.0]
    assert measured([*first, *second], "shared") == [0.25, -0.75, 0.25, 0.25]
    replayed = Member(0.0, group="g1", task="a", replayed=True)
    assert measured([*first, *second, replayed], "fresh_only")[-1] == -0.75


def test_fresh_rows_do_not_move_with_what_is_replayed_unless_they_share() -> None:
    alone = measured(FRESH, "stored", "grpo")
    for baseline in ("stored", "split", "fresh_only"):
        assert measured([*FRESH, *REPLAYED], baseline, "grpo")[:4] == alone
    for baseline in ("shared", "leave_one_out"):
        assert measured([*FRESH, *REPLAYED], baseline, "grpo")[:4] != alone


def test_reinforce_plus_plus_compares_all_tasks_with_each_other() -> None:
    members = [*FRESH, OTHER]
    rewards = np.float64([m.reward for m in members])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert measured(members, "stored", "reinforce++") == pytest.approx(expected.tolist(), rel=1e-9)


@pytest.mark.parametrize("baseline", ["split", "fresh_only", "shared", "leave_one_out"])
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "opo"])
def test_random_batches_follow_the_rule_written_out(algorithm: str, baseline: ReplayBaseline) -> None:
    rng = np.random.default_rng(5)
    members = [
        Member(
            float(rng.integers(0, 3)),
            int(rng.integers(1, 9)),
            group=f"{task}{'old' if replayed else 'new'}",
            task=task,
            replayed=replayed,
        )
        for task, replayed, count in zip(
            "aabbcc", itertools.cycle([False, True]), rng.integers(1, 6, 6).tolist(), strict=False
        )
        for _ in range(count)
    ]
    members = [members[i] for i in rng.permutation(len(members))]
    given = measured(members, baseline, algorithm)
    for i, member in enumerate(members):
        others = []
        for j, other in enumerate(members):
            wanted = {
                "shared": True,
                "leave_one_out": j != i,
                "split": other.replayed == member.replayed,
                "fresh_only": not other.replayed,
            }[baseline]
            if other.task == member.task and wanted and not (algorithm == "rloo" and j == i):
                others.append(other)
        assert given[i] == pytest.approx(written_out(member, others, algorithm), rel=1e-9, abs=1e-12)


def written_out(member: Member, others: list[Member], algorithm: str) -> float:
    if not others:
        return 0.0
    weights = [o.num_action_tokens if algorithm == "opo" else 1 for o in others]
    mean = sum(w * o.reward for w, o in zip(weights, others, strict=True)) / sum(weights)
    scale = 1.0
    if algorithm == "grpo" and len({o.reward for o in others}) > 1:
        scale = math.sqrt(sum((o.reward - mean) ** 2 for o in others) / (len(others) - 1)) + 1e-6
    return (member.reward - mean) / scale
