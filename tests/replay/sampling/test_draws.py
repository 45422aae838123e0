from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from replay import BatchRow, InvalidRecord, Limits, Pick, ReplayStore
from replay.sampling.samplers import make_sampler
from tests.fakes.records import (
    RUN,
    FreshRows,
    group,
    iterate,
    iteration_record,
    request,
    set_state,
    sql,
    task,
    trajectory,
)


def test_draw_reserves_slots_with_probability_and_staleness(store: ReplayStore) -> None:
    FreshRows(1, rates=(0.5, 0.75)).append_to(store)
    drawn = store.draw(request(3, 4), make_sampler("success", 0))
    assert [row.draw.slot for row in drawn] == [8, 9, 10, 11]
    for row in drawn:
        # Four rows of weight 0.5 and four of weight 0.25.
        rare = row.trajectory.record.group == "run-1-1-0-0"
        assert row.draw.probability == pytest.approx(0.5 / 3 if rare else 0.25 / 3)
        # Sampled by policy 0, drawn by policy 2.
        assert (row.draw.staleness, row.draw.state, row.draw.stream) == (2, "reserved", "replay")
        assert row.draw.trajectory == row.trajectory.id
    stored = sql(store, "select slot, trajectory, state from draws order by slot")
    assert stored == [(row.draw.slot, row.draw.trajectory, "reserved") for row in drawn]


def test_rows_of_the_drawing_iteration_and_later_ones_are_never_drawn(store: ReplayStore) -> None:
    for iteration in (1, 2, 3):
        FreshRows(iteration).append_to(store)
    sampler = make_sampler("uniform", 0)
    assert store.available(request(1, 1), sampler).rows == 0
    assert store.draw(request(1, 5), sampler) == []
    assert {row.trajectory.record.iteration for row in store.draw(request(2, 99), sampler)} == {1}


def test_commit_writes_statistics_iteration_metrics_and_sampler_together(store: ReplayStore) -> None:
    sampler = make_sampler("success", 0)
    iterate(store, 1, sampler)
    drawn = iterate(store, 2, sampler)
    rows = sql(store, "select trajectory, state, drift_max, staleness from draws where iteration=2 and slot>=8")
    assert rows == [(id, "committed", 1.5, 1) for id in drawn]
    assert sql(store, "select fresh, replay, optimizer_steps from iterations") == [(8, 0, 2), (8, 2, 2)]
    assert sql(store, "select iteration, name, value from metrics order by 1") == [
        (1, "actor/grad_norm", 0.5),
        (2, "actor/grad_norm", 1.0),
    ]
    states = sql(store, "select state from sampler_state order by iteration")
    assert json.loads(states[1][0]) == sampler.state()


def test_commit_of_other_draws_or_numbers_changes_nothing(store: ReplayStore) -> None:
    fresh, record = FreshRows(1).append_to(store).draws(), replace(iteration_record(1, replay=0), fraction=0.1)
    store.reserve_fresh(fresh)
    swapped = [replace(fresh[0], trajectory=fresh[1].trajectory), *fresh[1:]]
    for wrong in (fresh[:-1], swapped, [*fresh, replace(fresh[0], slot=7)]):
        with pytest.raises(InvalidRecord, match=r"^draws\[\d\].trajectory must be the reserved"):
            store.commit(record, wrong, sampler_state={})
    assert sql(store, "select distinct state from draws") == [("reserved",)]
    assert sql(store, "select count(*) from iterations") == [(0,)]
    for draws in (fresh[::-1], fresh):  # done again, it counts as done
        store.commit(record, draws, sampler_state={})
    with pytest.raises(InvalidRecord, match=r"^draws\[3\].trajectory must be the committed"):
        store.commit(record, fresh[:-1], sampler_state={})
    with pytest.raises(InvalidRecord, match="^iteration must be the committed .*'optimizer_steps': 2.* got .* 3"):
        store.commit(replace(record, optimizer_steps=3), fresh, sampler_state={})
    assert sql(store, "select state, count(*) from draws group by 1") == [("committed", 4)]
    assert sql(store, "select name, value from metrics") == [("actor/grad_norm", 0.5)]


def test_draw_done_again_takes_the_place_of_the_one_before(store: ReplayStore) -> None:
    FreshRows(1, size=8).append_to(store)
    asked = replace(request(2, 6), limits=Limits(successful_only=False, max_uses=1))
    store.draw(asked, make_sampler("uniform", 1))
    second = store.draw(asked, make_sampler("uniform", 2))
    # The eight rows are all there to choose from.
    assert len(second) == 6
    assert sql(store, "select slot, trajectory from draws order by 1") == [
        (row.draw.slot, row.trajectory.id) for row in second
    ]


def test_resume_goes_back_to_the_checkpoint(store: ReplayStore) -> None:
    sampler = make_sampler("success", 0)
    iterate(store, 1, sampler)
    iterate(store, 2, sampler)
    kept = sampler.state()
    iterate(store, 3, sampler)
    # A crash between the draw and the update of iteration 4.
    collected = FreshRows(4, rates=(0.5, 0.25)).append_to(store)
    store.draw(request(4, 2), sampler)
    store.add_metrics(RUN, 3, {"eval/success": 0.5})

    report = store.resume(RUN, 2)
    # Iteration 3 had 8 fresh and 2 drawn rows; 8 rows each were collected in 3 and 4.
    assert (report.released, report.rolled_back, report.orphaned) == (2, 10, 16)
    assert report.sampler_state == kept
    for table in ("draws", "iterations", "metrics", "sampler_state"):
        assert sql(store, f"select max(iteration) from {table}") == [(2,)]
    assert sql(store, "select max(version) from policies") == [(2,)]
    states = sql(store, "select iteration, state, count(*) from trajectories group by 1, 2 order by 1")
    assert states == [(1, "eligible", 8), (2, "eligible", 8), (3, "orphaned", 8), (4, "orphaned", 8)]
    # Orphans are kept for people, and never drawn.
    assert {row.trajectory.record.iteration for row in store.draw(request(9, 99), sampler)} == {1, 2}
    assert store.read([collected.trajectories[0].id])[0].record.state == "orphaned"


def picked(store: ReplayStore, *picks: Pick) -> list[BatchRow]:
    return store.draw(replace(request(9, 0), picks=picks), make_sampler("uniform", 5))


def test_picks_are_served_in_order_and_no_row_twice(store: ReplayStore) -> None:
    store.append([task("task-2")], [], [])
    FreshRows(1, rates=(0.5,)).append_to(store)
    taught = [trajectory(f"b{slot}", group="g2", task="task-2", slot=slot, source="teacher") for slot in (10, 11)]
    store.append([], [group("g2", task="task-2", size=2)], taught)
    drawn = picked(store, Pick(1, source="teacher"), Pick(2, task="task-1"), Pick(9, source="teacher"), Pick(9))
    # One of the two teacher's rows, two of the other task, the teacher's last one, then the two that are left.
    places = [(row.trajectory.record.source, row.trajectory.record.task) for row in drawn]
    teacher, own = ("teacher", "task-2"), ("self", "task-1")
    assert places == [teacher, own, own, teacher, own, own]
    assert len({row.trajectory.id for row in drawn}) == 6
    assert [row.draw.slot for row in drawn] == [8, 9, 10, 11, 12, 13]


def test_group_picks_give_whole_groups_and_never_a_part(store: ReplayStore) -> None:
    FreshRows(1, rates=(0.5, 0.25, 1.0), size=4).append_to(store)
    gone = store.read([row.trajectory.id for row in picked(store, Pick(99))])
    gone_id = next(row.id for row in gone if row.record.group == "run-1-1-0-2")
    store.resume(RUN, 1)
    set_state(store, gone_id, "evicted")
    drawn = picked(store, Pick(7, unit="group"), Pick(99, unit="group"))
    # Seven rows hold one group of four; the second pick takes the other; the third group has lost a member.
    groups = [row.trajectory.record.group for row in drawn]
    assert sorted(groups) == ["run-1-1-0-0"] * 4 + ["run-1-1-0-1"] * 4
    assert len(set(groups[:4])) == 1
    assert {row.draw.probability for row in drawn} == {0.5, 1.0}


def test_availability_counts_rows_and_complete_groups_by_source_and_task(store: ReplayStore) -> None:
    FreshRows(1, rates=(0.5, 0.25), size=4).append_to(store)
    sql(store, "update trajectories set source = 'teacher' where group_id = 'run-1-1-0-1'")
    found = store.available(request(9, 0), make_sampler("uniform", 0))
    assert (found.rows, found.by_task, found.groups) == (8, {"task-1": 8}, {4: 2})
    assert found.by_source == {"self": 4, "teacher": 4}
    assert found.by_source_task == {("self", "task-1"): 4, ("teacher", "task-1"): 4}
    assert found.by_source_groups == {("self", 4): 1, ("teacher", 4): 1}
    # Half of the first group and a quarter of the second.
    found = store.available(request(9, 0, successful_only=True), make_sampler("uniform", 0))
    assert (found.rows, found.by_source, found.groups) == (3, {"self": 2, "teacher": 1}, {})


@pytest.mark.parametrize("numbers", [{"policy_version": np.int64(3)}, {"policy_version": -5}, {"first_slot": -7}])
def test_draw_checks_the_numbers_it_stores(store: ReplayStore, numbers: dict[str, int]) -> None:
    FreshRows(1).append_to(store)
    with pytest.raises(InvalidRecord, match=f"^{next(iter(numbers))} must be "):
        store.draw(replace(request(2, 1), **numbers), make_sampler("uniform", 0))
