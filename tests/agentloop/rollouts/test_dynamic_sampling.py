"""Groups that tell nothing are replaced, in bounded rounds; and nothing that was collected is lost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentloop.records import KlPenalty
from agentloop.rollouts.dynamic_sampling import sample_dynamically, zero_variance_groups
from agentloop.rollouts.trajectories import Collected
from replay.records import GroupRecord
from tests.fakes.batch_rows import row, segment
from tests.fakes.records import group


def collected(**rewards: Sequence[float]) -> Collected:
    """Groups by name, each with its members' rewards; what differs has an advantage."""
    groups = [group(name, task=f"task of {name}", size=len(given)) for name, given in rewards.items()]
    rows = []
    for name, given in rewards.items():
        for i, reward in enumerate(given):
            advantage = reward - sum(given) / len(given)
            made = row(f"{name}{i}", segment("ul"), group=name, advantage=advantage).trajectory
            rows.append(replace(made, record=replace(made.record, reward=reward, task=f"task of {name}")))
    return Collected(
        groups=groups,
        trajectories=rows,
        rewrites=Counter({"clip": 1}),
        rewards={t.id: t.record.reward for t in rows},
        kl_penalties={t.id: KlPenalty(tokens=1) for t in rows},
        extra_metrics={"reward/brief": float(len(rows)), "rollout/reward_failures": 1.0, "user/tokens": 5.0},
    )


class Rounds:
    """Gives what a test has written down, and notes what was asked."""

    def __init__(self, *later: Collected) -> None:
        self._later = list(later)
        self.asked: list[list[int]] = []

    def __call__(self, sizes: Sequence[int], earlier: Sequence[Collected]) -> Collected:
        assert len(earlier) == len(self.asked) + 1
        self.asked.append(list(sizes))
        return replace(self._later.pop(0), further_tasks=(len(self.asked),))


def names(groups: Sequence[GroupRecord]) -> list[str]:
    return [group.id for group in groups]


def test_a_kl_penalty_hides_no_flat_group() -> None:
    found = collected(a=(1, 1), b=(0, 1))
    # The penalty tells the members of a apart, as it would those of any group.
    penalties = dict(zip(("a0", "a1", "b0", "b1"), (0.01, 0.02, 0.03, 0.01), strict=True))
    rows = [replace(t, record=replace(t.record, advantage=0.5 - penalties[t.id])) for t in found.trajectories]
    penalties_by_id = {id: KlPenalty(penalty, kl=1.0, tokens=1) for id, penalty in penalties.items()}
    charged = replace(found, trajectories=rows, kl_penalties=penalties_by_id)
    assert [group.id for group, _ in zero_variance_groups(charged)] == ["a"]
    assert zero_variance_groups(replace(found, trajectories=rows)) == []  # by a function of the user's own


def test_agents_with_rewards_of_their_own_are_a_signal_where_these_differ() -> None:
    found = collected(a=(1, 1), b=(1, 1))
    said = {"a0": '{"scout":[1.0,0.5]}', "a1": '{"scout":[0.0,-0.5]}', "b0": '{"scout":[1.0,0.0]}'}
    rows = [replace(t, record=replace(t.record, agent_rewards=said.get(t.id))) for t in found.trajectories]
    assert [group.id for group, _ in zero_variance_groups(replace(found, trajectories=rows))] == ["b"]


def test_groups_without_a_signal_are_replaced_in_their_places_until_none_is_left() -> None:
    first = collected(a=(0, 0), b=(0, 1), c=(1, 1, 1), d=(1, 0))
    more = Rounds(collected(e=(0, 0), f=(1, 0)), collected(g=(0, 1, 1)))
    result = sample_dynamically(first, more, rounds=5)
    assert more.asked == [[2, 3], [3]]
    assert names(result.groups) == ["f", "b", "g", "d"]
    assert [t.record.group for t in result.trajectories] == ["f", "f", "b", "b", "g", "g", "g", "d", "d"]
    assert names(result.unused_groups) == ["a", "c", "e"]
    assert [t.record.group for t in result.unused] == ["a", "a", "c", "c", "c", "e", "e"]
    assert result.further_tasks == (1, 2)
    assert len(result.rewards) == len(result.kl_penalties) == 16
    assert result.rewrites == {"clip": 3}
    assert result.extra_metrics == {
        "reward/brief": (9 * 9 + 4 * 4 + 3 * 3) / 16,
        "rollout/reward_failures": 3.0,
        "user/tokens": 15.0,
        "rollout/dynamic_sampling_rounds": 2.0,
        "rollout/zero_variance_groups": 2.0,
        "rollout/replaced_groups": 2.0,
        "rollout/zero_variance_groups_left": 0.0,
    }


@pytest.mark.parametrize(
    ("first", "later", "rounds", "asked", "in_batch", "unused", "left"),
    [
        ({"a": (0, 0), "b": (0, 1)}, [{"c": (0, 0)}], 1, [[2]], "ab", "c", 1.0),  # after the last round it stays
        ({"a": (0.5,), "b": (0, 1)}, [], 3, [], "ab", "", 0.0),  # one alone is not replaced
        ({"a": (0, 0), "b": (0, 1)}, [{}, {"c": (1, 0)}], 2, [[2], [2]], "cb", "a", 0.0),  # everything failed once
    ],
)
def test_rounds_are_bounded_and_keep_the_size_of_the_batch(
    first: Any, later: Any, rounds: int, asked: Any, in_batch: str, unused: str, left: float
) -> None:
    more = Rounds(*(collected(**round) if round else Collected() for round in later))
    result = sample_dynamically(collected(**first), more, rounds=rounds)
    assert (more.asked, names(result.groups), names(result.unused_groups)) == (asked, [*in_batch], [*unused])
    assert result.extra_metrics["rollout/zero_variance_groups_left"] == left
