"""Which rows a run may draw: what limits leave out of a draw, what they leave alone, and what changes about rows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from context.authors import Author, AuthorTable
from replay import BatchRow, DrawRequest, InvalidRecord, Limits, Pick, ReplayError, ReplayStore, make_sampler
from replay.staleness import may_be_fresh
from replay.storage.counters import LEASE_DRAWS
from tests.fakes.records import (
    AUTHORS,
    RUN,
    FreshRows,
    group,
    iteration_record,
    new_store,
    policy,
    run_record,
    set_state,
    sql,
    task,
    trajectory,
)


def asked(iteration: int, *picks: Pick, **limits: Any) -> DrawRequest:
    return DrawRequest(RUN, iteration, iteration - 1, picks, limits=Limits(**{"successful_only": False, **limits}))


def draw(store: ReplayStore, iteration: int, count: int = 99, **limits: Any) -> list[BatchRow]:
    return store.draw(asked(iteration, Pick(count), **limits), make_sampler("uniform", iteration))


def available(store: ReplayStore, iteration: int, **limits: Any) -> int:
    return store.available(asked(iteration, **limits), make_sampler("uniform", 0)).rows


def use(store: ReplayStore, iteration: int, count: int = 99, **limits: Any) -> list[str]:
    """Drawn and committed."""
    drawn = draw(store, iteration, count, **limits)
    store.commit(iteration_record(iteration, replay=len(drawn)), [row.draw for row in drawn], sampler_state={})
    return [row.trajectory.id for row in drawn]


def iterations(drawn: list[BatchRow]) -> Counter[int]:
    return Counter(row.trajectory.record.iteration for row in drawn)


def add_other(store: ReplayStore) -> None:
    store.add_run(run_record("run-0"))
    store.add_policy(policy(0, run="run-0"))


def test_a_run_draws_its_own_rows_and_imported_ones_and_those_of_runs_it_names(store: ReplayStore) -> None:
    add_other(store)
    FreshRows(1).append_to(store)
    FreshRows(1, run="run-0", rates=(0.5, 0.5)).append_to(store)
    for iteration, source in enumerate(("gateway", "earlier", "hindsight"), start=2):
        FreshRows(iteration, run="run-0", source=source).append_to(store)
    # Four of its own and four that were imported; the other run has eight, four as a gateway and four of hindsight.
    assert available(store, 9) == available(store, 9, sources=("self", "earlier")) == 8
    found = store.available(asked(9, sources=("self", "run-0")), make_sampler("uniform", 0))
    assert (found.rows, found.by_source) == (24, {"self": 4, "gateway": 4, "hindsight": 4, "earlier": 4, "run-0": 20})
    drawn = store.draw(asked(9, Pick(99, source="self"), Pick(99, source="run-0")), make_sampler("uniform", 0))
    assert [row.trajectory.record.run for row in drawn] == [RUN] * 4 + ["run-0"] * 20
    assert {row.draw.staleness for row in drawn[4:]} == {None}


def test_staleness_is_bounded_and_unknown_in_other_runs(store: ReplayStore) -> None:
    for iteration in range(1, 7):
        FreshRows(iteration).append_to(store)
    # Iteration i was collected by policy i - 1; iteration 7 is about to train policy 6.
    assert iterations(draw(store, 7, max_staleness=3)) == {4: 4, 5: 4, 6: 4}
    assert available(store, 8, max_staleness=3) == 8
    add_other(store)
    FreshRows(1, run="run-0", source="earlier").append_to(store)
    assert available(store, 20, max_staleness=1) == 4
    assert available(store, 20, unknown_staleness="refuse") == 24
    assert available(store, 20, max_staleness=1, unknown_staleness="refuse") == 0
    # Groups are fresh within their bound, also where a resume took weights back.
    assert [may_be_fresh(ages, 2) for ages in ([0, 2], [1, 3], [-2, 0], [-3])] == [True, False, True, False]


def test_max_uses_counts_committed_draws_and_reservations(store: ReplayStore) -> None:
    FreshRows(1, size=8).append_to(store)
    first, second = use(store, 2, 5, max_uses=1), use(store, 3, max_uses=1)
    assert (len(first), len(second), len({*first, *second})) == (5, 3, 8)
    assert draw(store, 4, max_uses=1) == []
    # A reservation that is still held counts like a committed draw.
    assert len(draw(store, 5, max_uses=2)) == 8
    assert draw(store, 6, max_uses=2) == []
    assert len(draw(store, 7, max_uses=3)) == 8


def pass_draws(store: ReplayStore, count: int) -> None:
    sql(store, "update buffer_state set value = value + ? where name = 'draws'", count)


def test_reservation_that_expired_holds_no_row_and_is_committed_no_more(store: ReplayStore) -> None:
    """Its rows may be another trainer's by now: used twice, they would be used more often than allowed."""
    FreshRows(1, size=8).append_to(store)
    late, record = draw(store, 2, 8, max_uses=1), iteration_record(2, replay=8)
    pass_draws(store, LEASE_DRAWS)
    assert available(store, 3, max_uses=1) == 0
    pass_draws(store, 1)
    assert available(store, 3, max_uses=1) == 8
    with pytest.raises(InvalidRecord, match=r"^draws\[0\] must be committed before 10,000 others .*--resume"):
        store.commit(record, [row.draw for row in late], sampler_state={})
    assert len(use(store, 3, 8, max_uses=1)) == 8
    assert sql(store, "select iteration, count(*) from draws where state = 'committed' group by 1") == [(3, 8)]
    # The last one that counts is committed.
    held = draw(store, 4, 8, max_uses=2)
    pass_draws(store, LEASE_DRAWS)
    store.commit(iteration_record(4, replay=8), [row.draw for row in held], sampler_state={})


def test_cooldown_rests_a_row_for_so_many_iterations(store: ReplayStore) -> None:
    FreshRows(1).append_to(store)
    assert len(use(store, 5, cooldown=2)) == 4
    # Drawn in 5: rests in 6 and 7.
    assert [available(store, iteration, cooldown=2) for iteration in (6, 7, 8)] == [0, 0, 4]


def test_caps_hold_within_one_draw(store: ReplayStore) -> None:
    store.append([task("task-2")], [], [])
    FreshRows(1, rates=(0.5, 0.5, 0.5)).append_to(store)
    store.append([], [group("g", task="task-2", size=1)], [trajectory("z", group="g", task="task-2", slot=50)])
    drawn = Counter(row.trajectory.record.group for row in draw(store, 2, per_group=2))
    assert drawn == {"run-1-1-0-0": 2, "run-1-1-0-1": 2, "run-1-1-0-2": 2, "g": 1}
    for iteration, picks, cap in ((3, (Pick(99),), 4), (4, (Pick(2, task="task-1"), Pick(9)), 3)):
        found = store.draw(asked(iteration, *picks, per_task=cap), make_sampler("uniform", 0))
        assert Counter(row.trajectory.record.task for row in found) == {"task-1": cap, "task-2": 1}
    sql(store, "update segments set tokens = ? where trajectory like '%1-1-0-0-0'", bytes(40))
    assert len(draw(store, 8, per_group=3)) == 10  # what can't be read fills no cap
    caps = [{"per_task": 4}, {"per_group": 2}, {"per_group": 1, "per_task": 2}]
    assert [available(store, 4, **limits) for limits in caps] == [5, 7, 3]


def test_solved_tasks_rest_until_they_are_forgotten(store: ReplayStore) -> None:
    FreshRows(1, rates=(0.5,)).append_to(store)
    assert available(store, 2, retire_solved=1.0) == 4
    FreshRows(2, rates=(1.0,)).append_to(store)
    assert available(store, 3, retire_solved=1.0) == 0
    FreshRows(3, rates=(0.75,)).append_to(store)
    # All twelve rows are back: the newest group counts.
    assert available(store, 4, retire_solved=1.0) == 12
    assert available(store, 4, retire_solved=0.75) == 0
    # What was undone says nothing about the policy there is.
    store.resume(RUN, 2)
    assert available(store, 4, retire_solved=0.75) == 0
    assert available(store, 4) == 8
    store.resume(RUN, 1)
    assert available(store, 4, retire_solved=0.75) == 4


EVERYTHING = ("tokenizer", "template", "model_family", "vocab_size", "logprobs_mode", "top_p", "top_k")
JUDGED = AuthorTable([*AUTHORS.authors, Author("judge", action=False, trained=False)])


@pytest.mark.parametrize("field", [*EVERYTHING, "authors"])
def test_rows_that_mean_something_else_are_left_out_and_refused_by_name(store: ReplayStore, field: str) -> None:
    """Four rows of another run: of another tokenizer, say, or with log-probs of another kind."""
    print: dict[str, object] = {"tokenizer": "t", "template": "p", "model_family": "m", "vocab_size": 9}
    own, other = replace(run_record(), id="mine", fingerprint=print), replace(run_record("run-0"), fingerprint=print)
    if field == "authors":
        other = replace(other, authors=JUDGED.to_json(), authors_hash=JUDGED.hash)
    elif field in print:
        other = replace(other, fingerprint=print | {field: 10})
    for run in (own, other):
        store.add_run(run)
        rows = FreshRows(1, run=run.id, source="self" if run is own else "earlier")
        if run is other and field in EVERYTHING[4:]:
            kind = {"logprobs_mode": "processed", "top_p": 0.9, "top_k": 50}[field]
            changed = [replace(row, record=replace(row.record, **{field: kind})) for row in rows.trajectories]
            rows.trajectories = changed
        rows.append_to(store)
    request = replace(asked(2), run="mine")
    found = store.available(request, make_sampler("uniform", 0))
    assert (found.rows, found.incomparable) == (4, {field: 4})
    with pytest.raises(ReplayError, match=rf"source 'run-0' must .* another {field}.*allow_mismatch: \[{field}\]"):
        store.draw(replace(request, picks=(Pick(1, source="run-0"),)), make_sampler("uniform", 0))
    allowed = replace(request, limits=Limits(successful_only=False, allow_mismatch=EVERYTHING))
    assert store.available(allowed, make_sampler("uniform", 0)).rows == (4 if field == "authors" else 8)


def test_a_damaged_number_of_a_row_hides_no_later_ones(store: ReplayStore) -> None:
    first = FreshRows(1).append_to(store)
    sql(store, "update trajectories set changed = 9000000000 where id = ?", first.trajectories[0].id)
    assert available(store, 2) == 4
    FreshRows(2).append_to(store)
    assert available(store, 3) == 8


def places(drawn: list[BatchRow]) -> list[tuple[str, int, int, float | None]]:
    return [(row.draw.trajectory, row.draw.slot, row.draw.iteration, row.draw.probability) for row in drawn]


SAMPLERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("uniform", {}, {"max_staleness": 5, "max_uses": 2}),
    ("difficulty", {"mode": "uniform_buckets"}, {"retire_solved": 1.0, "cooldown": 1}),
    ("entropy", {"pool": 2}, {"per_group": 1}),
    ("freshness", {"sampler": "reward", "tau": 2.0}, {"max_uses": 3}),
]


@pytest.mark.parametrize("name, options, limits", SAMPLERS, ids=[name for name, *_ in SAMPLERS])
def test_draws_are_the_same_after_a_restart_and_after_refreshes(
    tmp_path: Path, name: str, options: dict[str, Any], limits: dict[str, Any]
) -> None:
    outcomes = []
    for restarted in (False, True):
        store = new_store(tmp_path / f"restarted-{restarted}")
        add_other(store)
        sampler, found = make_sampler(name, 3, options), []
        for iteration in range(1, 8):
            rates = ((0.5, 0.25), (1.0, 0.75), (0.0, 0.5))[iteration % 3]
            FreshRows(iteration, rates=rates).append_to(store)
            if iteration % 3 == 0:
                # Lands before everything this run has collected.
                other = FreshRows(iteration // 3, run="run-0", source="earlier", rates=(0.5,)).append_to(store)
                set_state(store, other.trajectories[1].id, "evicted")
            if restarted:
                store.close()
                store = ReplayStore.open(store.path or store.url)
                state, sampler = sampler.state(), make_sampler(name, 99, options)
                sampler.load_state(json.loads(json.dumps(state)))
            picks = (Pick(2), Pick(2, source="self"), Pick(1, task="task-1"))
            drawn = store.draw(asked(iteration, *picks, **limits), sampler)
            store.commit(iteration_record(iteration, replay=0), [row.draw for row in drawn], sampler_state={})
            found.append(places(drawn))
        outcomes.append(found)
        store.close()
    assert outcomes[0] == outcomes[1]
    assert sum(map(len, outcomes[0])) > 15
