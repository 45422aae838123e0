from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from replay.mixing.mixer import with_completions
from replay.mixing.request import Pick
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from tests.fakes.records import FreshRows, new_store, request


def first(task: str, reward: float = 0.0, source: str | None = None) -> Pick:
    return Pick(1, source, task, reward_other_than=reward)


COMPLETED: list[tuple[list[Pick], list[tuple[str, float]], dict[tuple[str, float], int], tuple[Pick, ...]]] = [
    # Out of the largest pick.
    ([Pick(2, "teacher"), Pick(5, "self")], [("a", 0.0), ("b", 1.0)], {("a", 1.0): 3, ("b", 0.5): 1},
     (first("a", source="self"), first("b", 1.0, "self"), Pick(2, "teacher"), Pick(3, "self"))),
    # Of a same-task unit, out of the pick of its own group.
    ([Pick(2, task="a"), Pick(9, task="b")], [("a", 0.0)], {("a", 1.0): 2, ("b", 1.0): 9},
     (first("a"), Pick(1, task="a"), Pick(9, task="b"))),
    # What the buffer has nothing for stays as planned.
    ([Pick(3)], [("a", 0.0)], {("a", 0.0): 5, ("b", 1.0): 5}, (Pick(3),)),
    ([Pick(3, task="b")], [("a", 0.0)], {("a", 1.0): 5}, (Pick(3, task="b"),)),
    # One stored row completes one group, and there are never more than replayed rows.
    ([Pick(9)], [("a", 0.0), ("a", 0.0), ("b", 0.0)], {("a", 1.0): 1, ("b", 1.0): 4},
     (first("a"), first("b"), Pick(7))),
    ([Pick(1)], [("a", 0.0), ("a", 0.0), ("b", 0.0)], {("a", 1.0): 9, ("b", 1.0): 9}, (first("a"),)),
]  # fmt: skip


@pytest.mark.parametrize(("picks", "flat", "stored", "completed"), COMPLETED)
def test_groups_of_equal_rewards_are_completed_by_stored_rows_of_another(
    picks: list[Pick], flat: list[tuple[str, float]], stored: dict[tuple[str, float], int], completed: tuple[Pick, ...]
) -> None:
    assert with_completions(picks, flat, stored) == completed


def test_picks_draw_rows_of_another_reward_and_groups_of_the_stated_size(location: Location) -> None:
    with closing(new_store(location)) as store:
        FreshRows(1, rates=(0.5, 0.25)).append_to(store)
        FreshRows(2, rates=(0.5,), size=2).append_to(store)
        sampler = make_sampler("uniform", 0)
        available = store.available(request(3, 1), sampler)
        assert available.by_task_reward == {("task-1", 1.0): 4, ("task-1", 0.0): 6}
        assert available.groups == {4: 2, 2: 1}
        rewarded = replace(request(3, 1), picks=(Pick(9, task="task-1", reward_other_than=0.0),))
        assert [row.trajectory.record.reward for row in store.draw(rewarded, sampler)] == [1.0] * 4
        small = replace(request(3, 1), picks=(Pick(4, unit="group", size=2),), first_slot=20)
        assert [row.trajectory.record.iteration for row in store.draw(small, sampler)] == [2, 2]
