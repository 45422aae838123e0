"""Fresh and replayed members of a task: who is compared with whom, and what comes of it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.algorithms.advantages import RULES, Member, ReplayBaseline, advantages, compared_members, whitened

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
    found = measured([*FRESH, *REPLAYED, OTHER], baseline)
    assert found == pytest.approx([*fresh, *replayed, 0.0], abs=1e-15)


@settings(max_examples=300, deadline=None)
@given(
    rewards=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12),
    scale=st.sampled_from([1e-9, 1e-4, 1.0]),
    replayed=st.integers(0, 12),
    baseline=st.sampled_from(["stored", "split", "fresh_only", "shared", "leave_one_out"]),
    algorithm=st.sampled_from(["grpo", "reinforce++"]),
)
def test_advantage_that_is_divided_is_at_most_the_root_of_the_number_compared(
    rewards: list[float], scale: float, replayed: int, baseline: ReplayBaseline, algorithm: str
) -> None:
    members = [
        Member(reward * scale, group="g", task="a", replayed=position < replayed)
        for position, reward in enumerate(rewards)
    ]
    for value in measured(members, baseline, algorithm):
        assert abs(value) <= math.sqrt(len(members)) * (1 + 1e-9)


@pytest.mark.parametrize("apart", [0.0, 1e-9, 1e-5])
def test_replayed_advantages_that_are_whitened_by_nearly_equal_fresh_ones_are_bounded(apart: float) -> None:
    values = [apart * (-1) ** number for number in range(8)] + [0.75]
    compared = [tuple(range(8))] * 9
    assert whitened(values, compared)[-1] == pytest.approx(3.0, rel=0.01)


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
    found = measured(members, baseline, algorithm)
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
        assert found[i] == pytest.approx(written_out(member, others, algorithm), rel=1e-9, abs=1e-12)


def written_out(member: Member, others: list[Member], algorithm: str) -> float:
    if not others:
        return 0.0
    weights = [o.num_action_tokens if algorithm == "opo" else 1 for o in others]
    mean = sum(w * o.reward for w, o in zip(weights, others, strict=True)) / sum(weights)
    scale = 1.0
    if algorithm == "grpo":
        everyone = [o.reward for o in others] + [member.reward] * all(o is not member for o in others)
        scale = float(np.std(np.float64(everyone), ddof=1)) + 1e-6 if len(everyone) > 1 else 1.0
    return (member.reward - mean) / scale
