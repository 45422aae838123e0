"""Which rows a run may draw, how it follows what changes about them, and what that costs. On both databases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from replay import DrawRequest, Limits, Pick, ReplayStore, make_sampler
from replay.sampling.index import EligibleIndex
from tests.fakes.records import RUN, FreshRows, iterate, iteration_record, policy, run_record, sql
from tests.fakes.replay_command import rows_read

OTHER = "run-0"


def asked(iteration: int, *picks: Pick, run: str = RUN, **limits: Any) -> DrawRequest:
    return DrawRequest(run, iteration, iteration - 1, picks, limits=Limits(**limits))


def available(store: ReplayStore, iteration: int, **limits: Any) -> int:
    return store.available(asked(iteration, **limits), make_sampler("uniform", 0)).rows


def use(store: ReplayStore, iteration: int, count: int, *, run: str = RUN, **limits: Any) -> list[str]:
    """Drawn and committed."""
    drawn = store.draw(asked(iteration, Pick(count), run=run, **limits), make_sampler("uniform", iteration))
    record = replace(iteration_record(iteration, replay=len(drawn)), run=run)
    store.commit(record, [row.draw for row in drawn], sampler_state={})
    return [row.trajectory.id for row in drawn]


def add_other(store: ReplayStore, run: str = OTHER) -> None:
    store.add_run(run_record(run))
    store.add_policy(policy(0, run=run))


def test_a_run_draws_its_own_rows_and_imported_ones_and_those_of_runs_it_names(store: ReplayStore) -> None:
    add_other(store)
    FreshRows(1).append_to(store)
    FreshRows(1, run=OTHER, rates=(0.5, 0.5)).append_to(store)
    FreshRows(2, run=OTHER, source="gateway").append_to(store)
    FreshRows(3, run=OTHER, source="earlier").append_to(store)
    FreshRows(4, run=OTHER, source="hindsight").append_to(store)
    # Four of its own and four that were imported; the other run has eight, four as a gateway and four of hindsight.
    assert available(store, 9) == 8
    assert available(store, 9, sources=("self", OTHER)) == 4 + 20
    assert available(store, 9, sources=("self", "earlier")) == 8
    assert available(store, 9) == 8
    found = store.available(asked(9, sources=("self", OTHER)), make_sampler("uniform", 0))
    assert found.by_source == {"self": 4, "gateway": 4, "hindsight": 4, "earlier": 4, OTHER: 20}
    drawn = store.draw(asked(9, Pick(99, source="self"), Pick(99, source=OTHER)), make_sampler("uniform", 0))
    assert [row.trajectory.record.run for row in drawn] == [RUN] * 4 + [OTHER] * 20


def test_solved_tasks_are_told_from_groups_that_are_new(store: ReplayStore) -> None:
    for iteration in range(1, 11):
        FreshRows(iteration, rates=(0.5,) * 4).append_to(store)
    with rows_read() as read:
        assert available(store, 11, retire_solved=1.0) == 160
    assert read["groups"] == 40
    with rows_read() as read:
        available(store, 11, retire_solved=1.0)
    assert read["groups"] == 4
    FreshRows(11, rates=(1.0, 1.0)).append_to(store)
    with rows_read() as read:
        assert available(store, 12, retire_solved=1.0) == 0
    # The four of iteration 10, which may have got more since, and two.
    assert read["groups"] == 6


def test_a_draw_beside_rows_of_other_runs_reads_none_of_them(store: ReplayStore) -> None:
    add_other(store)
    FreshRows(1).append_to(store)
    limits: dict[str, Any] = {"max_uses": 9, "cooldown": 1, "retire_solved": 1.0}
    read = []
    for iteration, others in ((2, 0), (30, 500)):
        if others:
            FreshRows(1, run=OTHER, rates=(0.5,) * 5, size=others // 5).append_to(store)
        fresh = ReplayStore.open(store.path or store.url)
        with rows_read() as first:
            use(fresh, iteration, 2, **limits)
        # The others change, too, before the next draw.
        sql(store, "update buffer_state set value = value + 1 where name = 'changed'")
        newest = "(select value from buffer_state where name = 'changed')"
        sql(store, f"update trajectories set uses = uses + 1, changed = {newest} where run = '{OTHER}'")
        with rows_read() as later:
            use(fresh, iteration + 10, 2, **limits)
        read.append((first["trajectories"], later["trajectories"]))
        fresh.close()
    assert read[0] == read[1]


def followed(store: ReplayStore, index: EligibleIndex) -> EligibleIndex:
    with store.reading() as connection:
        index.refresh(connection)
    return index


def test_uses_change_no_row_s_place(store: ReplayStore) -> None:
    sampler = make_sampler("uniform", 0)
    iterate(store, 1, sampler)
    index = followed(store, EligibleIndex(RUN))
    drawn = iterate(store, 2, sampler, count=3)
    followed(store, index)
    assert [id for id, uses in zip(index.ids, index.columns["uses"].tolist(), strict=True) if uses] == [
        id for id in index.ids if id in drawn
    ]
    store.resume(RUN, 1)
    followed(store, index)
    assert (len(index), index.columns["uses"].sum()) == (8, 0)


def test_a_damaged_number_of_a_row_hides_no_later_ones(store: ReplayStore) -> None:
    first = FreshRows(1).append_to(store)
    sql(store, "update trajectories set changed = 9000000000 where id = ?", first.trajectories[0].id)
    assert available(store, 2) == 4
    FreshRows(2).append_to(store)
    assert available(store, 3) == 8


def test_a_change_by_hand_is_seen_by_a_trainer_that_runs(store: ReplayStore) -> None:
    collected = FreshRows(1, rates=(0.0,)).append_to(store)
    assert available(store, 2, successful_only=True) == 0
    sql(store, "update buffer_state set value = value + 1 where name = 'changed'")
    newest = "(select value from buffer_state where name = 'changed')"
    edit = f"update trajectories set success = true, record_checksum = null, changed = {newest} where id = ?"
    sql(store, edit, collected.trajectories[0].id)
    assert available(store, 2, successful_only=True) == 1
