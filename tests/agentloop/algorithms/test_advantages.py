"""Every algorithm's advantages against its formula, written out here in plain float64 loops."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.algorithms.advantages import ReplayBaseline, advantages_for_members, normalise_batch, whiten_members
from agentloop.algorithms.baselines.grpo import group_advantages
from agentloop.algorithms.catalog import ALGORITHMS
from agentloop.algorithms.declarations import Member

COMPARING = ("grpo", "dr_grpo", "rloo", "opo", "reinforce++_baseline")


def of_group(algorithm: str, rewards: Sequence[float], lengths: Sequence[int] | None = None) -> list[float]:
    members = [Member(r, n) for r, n in zip(rewards, lengths or [1] * len(rewards), strict=True)]
    return advantages_for_members(members, "stored", ALGORITHMS[algorithm])


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


@pytest.mark.parametrize("algorithm", [*COMPARING, "reinforce++", "reinforce"])
def test_advantages_follow_the_formula_of_their_algorithm(algorithm: str) -> None:
    rng = np.random.default_rng(3)
    for size in [2, 3, 5, 8, 33] * 4:
        rewards = (rng.normal(size=size) * 10.0 ** rng.integers(-3, 4)).tolist()
        lengths = rng.integers(1, 500, size).tolist()
        group = [Member(r, n) for r, n in zip(rewards, lengths, strict=True)]
        want = rewards
        if algorithm != "reinforce":
            kind = {"reinforce++": "grpo", "reinforce++_baseline": "dr_grpo"}.get(algorithm, algorithm)
            want = [written_out(own, [o for o in group if algorithm != "rloo" or o is not own], kind) for own in group]
        if algorithm == "reinforce++_baseline":
            want = (np.float64(want) / math.sqrt(np.var(want, ddof=1) + 1e-8)).tolist()
        assert of_group(algorithm, rewards, lengths) == pytest.approx(want, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("rewards", [[1.0], [0.3] * 7, [1.0, 0.0, 0.0], [0.1, -4.0, 2.5, 2.5]])
def test_an_imported_group_has_the_advantages_of_a_collected_one(rewards: list[float]) -> None:
    assert group_advantages(rewards, True) == of_group("grpo", rewards)
    assert group_advantages(rewards, False) == of_group("dr_grpo", rewards)


def test_remax_compares_with_the_greedy_reward_and_knows_when_there_is_none() -> None:
    members = [Member(1.0, greedy_reward=0.25), Member(0.25, greedy_reward=0.25), Member(1.0)]
    assert advantages_for_members(members, "stored", ALGORITHMS["remax"]) == [0.75, 0.0, 0.0]


@pytest.mark.parametrize("rewards", [[1.0], [0.1] * 3, [0.94] * 7, [0.0, 0.0], [1e9] * 5, []])
@pytest.mark.parametrize("algorithm", [*COMPARING, "reinforce++"])
def test_advantages_of_one_member_or_equal_rewards_are_exactly_zero(rewards: list[float], algorithm: str) -> None:
    assert of_group(algorithm, rewards, list(range(3, 3 + len(rewards)))) == [0.0] * len(rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("algorithm", [name for name, each in ALGORITHMS.items() if not each.needs_critic])
def test_advantages_refuse_rewards_that_are_not_finite(algorithm: str, bad: float) -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\] must be finite"):
        of_group(algorithm, [1.0, bad])


# Deviations are sqrt(variance + 1e-8), variance with n - 1.
ROOT_THIRD = math.sqrt(1 / 3 + 1e-8)
ROOT_5_5 = math.sqrt(5.5 + 1e-8)


def test_advantages_over_groups_are_whitened_by_all_of_them_together() -> None:
    # Groups [1, 0, 0, 0] and [1, 1]: 0.75, -0.25 x 3 and 0, 0. Mean 0, variance (0.5625 + 3 x 0.0625) / 5 = 0.15.
    values = [0.75, -0.25, -0.25, -0.25, 0.0, 0.0]
    scale = math.sqrt(0.15 + 1e-8)
    expected = [0.75 / scale, *[-0.25 / scale] * 3, 0.0, 0.0]
    assert whiten_members(values, [range(6)] * 6) == pytest.approx(expected, abs=1e-12)
    assert whiten_members(values, [range(6)] * 6)[4:] == [0.0, 0.0]
    assert whiten_members([0.0] * 4, [range(4)] * 4) == [0.0] * 4
    # The mean is only what rounding leaves of 0.1 + 0.2 - 0.3.
    assert whiten_members([0.1, 0.2, -0.3, 0.0], [range(4)] * 4)[3] == 0.0


@pytest.mark.parametrize(
    ("values", "replayed", "centre", "zero_is_measured", "expected"),
    [
        # Where groups are compared zeros are no signal: of 1, -1, 3 the mean is 1, the variance (0 + 4 + 4) / 2 = 4.
        ([1.0, 0.0, -1.0, 3.0, 0.0], 0, True, False, [0, 0, -1, 1, 0]),
        ([1.0, 0.0, 0.0], 0, True, False, [0, 0, 0]),
        ([0.3] * 7, 0, True, False, [0] * 7),
        ([], 0, True, False, []),
        # Mean 1 - 1e-6 / 3, variance 1e-12 / 3, which is rounding: 0.333e-6 / 1e-4.
        ([1.0, 1.0, 0.999999], 0, True, False, [1 / 300, 1 / 300, -2 / 300]),
        # A zero that is measured: mean 1/3, variance 1/3.
        ([1.0, 0.0, 0.0], 0, True, True, [2 / 3 / ROOT_THIRD, -1 / 3 / ROOT_THIRD, -1 / 3 / ROOT_THIRD]),
        ([1.0, 1.0, 1.0], 0, True, True, [0, 0, 0]),
        ([0.0], 0, True, True, [0]),
        # Scaling takes no mean off: 1 + 1 + 9 = 11 over 2; nearly equal values stay nearly 1.
        ([1.0, 0.0, -1.0, 3.0], 0, False, False, [1 / ROOT_5_5, 0, -1 / ROOT_5_5, 3 / ROOT_5_5]),
        ([1.0, 0.0], 0, False, True, [1, 0]),
        ([0.0, -0.7], 0, False, False, [0, -1]),
        ([0.9, 0.9, 0.9, 0.9, 0.90001], 0, False, False, [math.sqrt(4 / 5)] * 5),
        # Two replayed successes: fresh ones by their own mean 0.25 and sum (0.5625 + 3 x 0.0625) / 3 = 0.25; replayed
        # ones 0.75 from it, by all six: (0.75 + 2 x 0.5625) / 5 = 0.375. No success is below 0.
        ([1.0, 0.0, 0.0, 0.0, 1.0, 1.0], 2, True, True, [1.5, -0.5, -0.5, -0.5, *[0.75 / math.sqrt(0.375)] * 2]),
        # Fresh ones that are equal: the replayed one is sqrt(n - 1) away, by (0.5^2) / 4.
        ([0.5, 0.5, 0.5, 0.5, 1.0], 1, True, False, [0, 0, 0, 0, 2]),
        # No fresh row has a signal: nothing to take off.
        ([0.0, 0.0, 0.5, 0.5], 2, True, False, [0, 0, math.sqrt(1 / 2), math.sqrt(1 / 2)]),
    ],
)
def test_advantages_of_a_batch_are_whitened_or_scaled_as_written(
    values: list[float], replayed: int, centre: bool, zero_is_measured: bool, expected: list[float]
) -> None:
    fresh = [position < len(values) - replayed for position in range(len(values))]
    found = normalise_batch(values, fresh, centre=centre, zero_is_measured=zero_is_measured)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-12)


# Fresh and replayed members of a task: who is compared with whom, and what comes of it

FRESH = [Member(reward, group="g", task="a") for reward in (1.0, 0.0, 0.0, 1.0)]
REPLAYED = [Member(reward, group=f"old{reward}", task="a", replayed=True) for reward in (1.0, 0.25)]


def measured(members: list[Member], baseline: ReplayBaseline, algorithm: str = "dr_grpo") -> list[float]:
    return advantages_for_members(members, baseline, ALGORITHMS[algorithm])


@settings(max_examples=300, deadline=None)
@given(
    rewards=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12),
    scale=st.sampled_from([1e-9, 1e-4, 1.0]),
    replayed=st.integers(0, 12),
    baseline=st.sampled_from(["stored", "split", "fresh_only", "shared"]),
    algorithm=st.sampled_from(["grpo", "reinforce++"]),
)
def test_advantage_that_is_divided_is_at_most_the_root_of_the_number_compared(
    rewards: list[float], scale: float, replayed: int, baseline: ReplayBaseline, algorithm: str
) -> None:
    members = [Member(reward * scale, group="g", task="a", replayed=at < replayed) for at, reward in enumerate(rewards)]
    for value in measured(members, baseline, algorithm):
        assert abs(value) <= math.sqrt(len(members)) * (1 + 1e-9)


@pytest.mark.parametrize("apart", [0.0, 1e-9, 1e-5])
def test_replayed_advantages_that_are_whitened_by_nearly_equal_fresh_ones_are_bounded(apart: float) -> None:
    values = [apart * (-1) ** number for number in range(8)] + [0.75]
    compared = [tuple(range(8))] * 9
    assert whiten_members(values, compared)[-1] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("baseline", ["stored", "split", "fresh_only", "shared"])
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "opo"])
def test_degenerate_members_have_exactly_zero(algorithm: str, baseline: ReplayBaseline) -> None:
    same = [Member(0.94, 7 + i, group="g", task="a", replayed=i > 3) for i in range(7)]
    assert measured(same, baseline, algorithm) == [0.0] * 7
    assert measured([same[0]], baseline, algorithm) == [0.0]
    assert measured([same[6]], baseline, algorithm) == [0.0]


@pytest.mark.parametrize("baseline", ["stored", "split", "fresh_only", "shared"])
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "opo", "reinforce++"])
def test_nobody_is_compared_with_a_member_of_whom_nothing_was_sampled(algorithm: str, baseline: ReplayBaseline) -> None:
    empty = [Member(9.0, 0, group="g", task="a"), Member(-9.0, 0, group="old", task="a", replayed=True)]
    members = [*FRESH, *REPLAYED]
    assert measured([*members, *empty], baseline, algorithm)[: len(members)] == measured(members, baseline, algorithm)
    assert measured(empty[:1], "stored", algorithm) == [0.0]


def test_groups_of_one_task_stay_apart_but_where_all_are_compared() -> None:
    first = [Member(reward, group="g1", task="a") for reward in (1.0, 0.0)]
    second = [Member(reward, group="g2", task="a") for reward in (1.0, 1.0)]
    for baseline in ("stored", "split", "fresh_only"):
        assert measured([*first, *second], baseline) == [0.5, -0.5, 0.0, 0.0]
    assert measured([*first, *second], "shared") == [0.25, -0.75, 0.25, 0.25]
    replayed = Member(0.0, group="g1", task="a", replayed=True)
    assert measured([*first, *second, replayed], "fresh_only")[-1] == -0.75
    assert measured([*first, *second, replayed, replayed], "stored")[-2:] == [0.0, 0.0]


@pytest.mark.parametrize("baseline", ["split", "fresh_only", "shared"])
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "opo"])
def test_random_batches_follow_the_rule_written_out(algorithm: str, baseline: ReplayBaseline) -> None:
    rng = np.random.default_rng(5)
    members = [
        Member(
            float(rng.integers(0, 3)), int(rng.integers(1, 9)), group=f"{task}{replayed}", task=task, replayed=replayed
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
                "split": other.replayed == member.replayed,
                "fresh_only": not other.replayed,
            }[baseline]
            if other.task == member.task and wanted and not (algorithm == "rloo" and j == i):
                others.append(other)
        assert found[i] == pytest.approx(written_out(member, others, algorithm), rel=1e-9, abs=1e-12)
