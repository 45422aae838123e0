from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from replay.mixing.mixer import with_completions
from replay.mixing.request import Limits, Pick
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from tests.fakes.records import FreshRows, new_store, request


def test_a_flat_group_is_completed_out_of_the_largest_pick() -> None:
    picks = with_completions(
        [Pick(2, "teacher"), Pick(5, "self")], [("a", 0.0), ("b", 1.0)], {("a", 1.0): 3, ("b", 0.5): 1}
    )
    assert picks == (
        Pick(1, "self", "a", reward_other_than=0.0),
        Pick(1, "self", "b", reward_other_than=1.0),
        Pick(2, "teacher"),
        Pick(3, "self"),
    )


def test_a_same_task_unit_is_completed_out_of_its_own_group() -> None:
    picks = with_completions([Pick(2, task="a"), Pick(9, task="b")], [("a", 0.0)], {("a", 1.0): 2, ("b", 1.0): 9})
    assert picks == (Pick(1, task="a", reward_other_than=0.0), Pick(1, task="a"), Pick(9, task="b"))


def test_what_the_buffer_has_nothing_for_stays_as_planned() -> None:
    planned = (Pick(3),)
    assert with_completions(planned, [("a", 0.0)], {("a", 0.0): 5, ("b", 1.0): 5}) == planned
    assert with_completions((Pick(3, task="b"),), [("a", 0.0)], {("a", 1.0): 5}) == (Pick(3, task="b"),)


def test_one_stored_row_completes_one_group_and_completions_never_exceed_the_replayed_rows() -> None:
    flat = [("a", 0.0), ("a", 0.0), ("b", 0.0)]
    assert with_completions([Pick(9)], flat, {("a", 1.0): 1, ("b", 1.0): 4}) == (
        Pick(1, task="a", reward_other_than=0.0),
        Pick(1, task="b", reward_other_than=0.0),
        Pick(7),
    )
    assert with_completions([Pick(1)], flat, {("a", 1.0): 9, ("b", 1.0): 9}) == (
        Pick(1, task="a", reward_other_than=0.0),
    )


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


@pytest.mark.parametrize(
    ("limits", "rows"),
    [(Limits(), 8), (Limits(per_group=1), 2), (Limits(per_task=3), 3), (Limits(per_group=3, per_task=5), 5)],
)
def test_what_is_there_is_told_within_the_caps(location: Location, limits: Limits, rows: int) -> None:
    with closing(new_store(location)) as store:
        FreshRows(1, rates=(0.5, 0.25)).append_to(store)
        available = store.available(replace(request(3, 1), limits=limits), make_sampler("uniform", 0))
        assert available.rows == available.by_task["task-1"] == available.by_source["self"] == rows
        assert available.by_source_task == {("self", "task-1"): rows}
