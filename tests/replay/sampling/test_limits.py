"""What limits leave out of a draw, and what they leave alone. On both databases."""

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
    return DrawRequest(RUN, iteration, iteration - 1, picks, limits=Limits(**limits))


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


def test_max_staleness_leaves_older_rows_out(store: ReplayStore) -> None:
    for iteration in range(1, 7):
        FreshRows(iteration).append_to(store)
    # Iteration i was collected by policy i - 1; iteration 7 is about to train policy 6.
    assert iterations(draw(store, 7, max_staleness=3)) == {4: 4, 5: 4, 6: 4}
    assert available(store, 8, max_staleness=3) == 8


def test_groups_are_fresh_within_the_bound_also_where_a_resume_took_weights_back() -> None:
    assert [may_be_fresh(ages, 2) for ages in ([0, 2], [1, 3], [-2, 0], [-3])] == [True, False, True, False]


def test_rows_of_other_runs_have_unknown_staleness_which_can_be_refused(store: ReplayStore) -> None:
    store.add_run(run_record("run-0"))
    store.add_policy(policy(0, run="run-0"))
    FreshRows(1, run="run-0", source="earlier").append_to(store)
    FreshRows(1).append_to(store)
    assert available(store, 20, max_staleness=1) == 4
    assert available(store, 20, unknown_staleness="refuse") == 4
    assert available(store, 20, max_staleness=1, unknown_staleness="refuse") == 0


def test_max_uses_counts_committed_draws_and_reservations(store: ReplayStore) -> None:
    FreshRows(1, size=8).append_to(store)
    first, second = use(store, 2, 5, max_uses=1), use(store, 3, max_uses=1)
    assert (len(first), len(second), len({*first, *second})) == (5, 3, 8)
    assert draw(store, 4, max_uses=1) == []
    # A reservation that is still held counts like a committed draw.
    assert len(draw(store, 5, max_uses=2)) == 8
    assert draw(store, 6, max_uses=2) == []
    assert len(draw(store, 7, max_uses=3)) == 8


def test_reservation_of_a_trainer_that_died_expires(store: ReplayStore) -> None:
    FreshRows(1, size=8).append_to(store)
    draw(store, 2, 5, max_uses=1)
    assert available(store, 3, max_uses=1) == 3
    sql(store, "update buffer_state set value = value + ? where name = 'draws'", LEASE_DRAWS)
    assert available(store, 3, max_uses=1) == 3
    sql(store, "update buffer_state set value = value + 1 where name = 'draws'")
    assert available(store, 3, max_uses=1) == 8


def test_reservation_that_expired_is_committed_no_more(store: ReplayStore) -> None:
    """Its rows may be another trainer's by now: used twice, they would be used more often than allowed."""
    FreshRows(1, size=8).append_to(store)
    late, record = draw(store, 2, 8, max_uses=1), iteration_record(2, replay=8)
    sql(store, "update buffer_state set value = value + ? where name = 'draws'", LEASE_DRAWS + 1)
    with pytest.raises(InvalidRecord, match=r"^draws\[0\] must be committed before 10,000 others .*--resume"):
        store.commit(record, [row.draw for row in late], sampler_state={})
    assert len(use(store, 3, 8, max_uses=1)) == 8
    assert sql(store, "select iteration, count(*) from draws where state = 'committed' group by 1") == [(3, 8)]
    # The last one that counts is committed.
    held = draw(store, 4, 8, max_uses=2)
    sql(store, "update buffer_state set value = value + ? where name = 'draws'", LEASE_DRAWS)
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
    drawn = draw(store, 2, per_group=2)
    assert Counter(row.trajectory.record.group for row in drawn) == {
        "run-1-1-0-0": 2,
        "run-1-1-0-1": 2,
        "run-1-1-0-2": 2,
        "g": 1,
    }
    drawn = draw(store, 3, per_task=4)
    assert Counter(row.trajectory.record.task for row in drawn) == {"task-1": 4, "task-2": 1}
    # Also over several picks.
    picks = (Pick(2, task="task-1"), Pick(9))
    found = store.draw(asked(4, *picks, per_task=3), make_sampler("uniform", 0))
    assert Counter(row.trajectory.record.task for row in found) == {"task-1": 3, "task-2": 1}
    assert available(store, 4, per_task=4) == 5
    assert available(store, 4, per_group=2) == 7
    assert available(store, 4, per_group=1, per_task=2) == 3


def test_solved_tasks_rest_until_they_are_forgotten(store: ReplayStore) -> None:
    FreshRows(1, rates=(0.5,)).append_to(store)
    assert available(store, 2, retire_solved=1.0) == 4
    FreshRows(2, rates=(1.0,)).append_to(store)
    assert available(store, 3, retire_solved=1.0) == 0
    FreshRows(3, rates=(0.75,)).append_to(store)
    # All twelve rows are back: a task that is solved no longer needs them.
    assert available(store, 4, retire_solved=1.0) == 12
    assert available(store, 4, retire_solved=0.75) == 0
    # What was undone says nothing about the policy there is.
    store.resume(RUN, 2)
    assert available(store, 4, retire_solved=0.75) == 0
    assert available(store, 4) == 8
    store.resume(RUN, 1)
    assert available(store, 4, retire_solved=0.75) == 4


def fingerprinted(store: ReplayStore, run: str, **changes: Any) -> None:
    print = {"tokenizer": "t", "template": "p", "model_family": "m", "vocab_size": 9, **changes}
    sql(store, "update runs set fingerprint = ? where id = ?", json.dumps(print), run)


@pytest.mark.parametrize("field", ["tokenizer", "template", "model_family", "vocab_size"])
def test_rows_of_another_fingerprint_are_left_out_and_refused_by_name(store: ReplayStore, field: str) -> None:
    store.add_run(run_record("run-0"))
    FreshRows(1, run="run-0", source="earlier").append_to(store)
    FreshRows(1).append_to(store)
    fingerprinted(store, RUN)
    fingerprinted(store, "run-0")
    assert available(store, 2) == 8
    fingerprinted(store, "run-0", **{field: 10})
    # Rows of a run come after its fingerprint; here it changes under them.
    store = ReplayStore.open(store.path or store.url)
    found = store.available(asked(2), make_sampler("uniform", 0))
    assert (found.rows, found.incomparable) == (4, {field: 4})
    assert {row.trajectory.record.run for row in draw(store, 2)} == {RUN}
    with pytest.raises(ReplayError, match=rf"source 'run-0' must .* another {field}.*allow_mismatch: \[{field}\]"):
        store.draw(asked(3, Pick(1, source="run-0")), make_sampler("uniform", 0))
    with pytest.raises(ReplayError, match="source 'run-0' must"):
        draw(store, 3, sources=("run-0",))
    assert available(store, 2, allow_mismatch=(field,)) == 8


@pytest.mark.parametrize("field, value", [("logprobs_mode", "processed"), ("top_p", 0.9), ("top_k", 50)])
def test_log_probs_of_another_kind_are_left_out(store: ReplayStore, field: str, value: object) -> None:
    FreshRows(1, size=3).append_to(store)
    store.append([], [], [trajectory("z", group="run-1-1-0-0", slot=50, source="import", **{field: value})])
    found = store.available(asked(2), make_sampler("uniform", 0))
    assert (found.rows, found.incomparable) == (3, {field: 1})
    with pytest.raises(ReplayError, match=rf"source 'import' must .* another {field}"):
        store.draw(asked(3, Pick(1, source="import")), make_sampler("uniform", 0))
    assert available(store, 2, allow_mismatch=(field,)) == 4


def test_other_author_codes_are_never_allowed(store: ReplayStore) -> None:
    others = AuthorTable([*AUTHORS.authors, Author("judge", action=False, trained=False)])
    store.add_run(replace(run_record("run-0"), authors=others.to_json(), authors_hash=others.hash))
    store.add_policy(policy(0, run="run-0"))
    FreshRows(1, run="run-0", source="earlier").append_to(store)
    everything = ("tokenizer", "template", "model_family", "vocab_size", "logprobs_mode", "top_p", "top_k")
    found = store.available(asked(2, allow_mismatch=everything), make_sampler("uniform", 0))
    assert (found.rows, found.incomparable) == (0, {"authors": 4})


def places(drawn: list[BatchRow]) -> list[tuple[str, int, int, float | None]]:
    return [(row.draw.trajectory, row.draw.slot, row.draw.iteration, row.draw.probability) for row in drawn]


SAMPLERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("uniform", {}, {"max_staleness": 5, "max_uses": 2}),
    ("recency", {"half_life": 1.5}, {"per_group": 1}),
    ("success", {}, {"cooldown": 1}),
    ("difficulty", {"mode": "uniform_buckets"}, {"retire_solved": 1.0}),
    ("advantage", {}, {"per_task": 3}),
    ("entropy", {"pool": 2}, {}),
    ("freshness", {"sampler": "reward", "tau": 2.0}, {"max_uses": 3}),
]


@pytest.mark.parametrize("name, options, limits", SAMPLERS, ids=[name for name, *_ in SAMPLERS])
def test_draws_are_the_same_after_a_restart_and_after_refreshes(
    tmp_path: Path, name: str, options: dict[str, Any], limits: dict[str, Any]
) -> None:
    outcomes = []
    for restarted in (False, True):
        store = new_store(tmp_path / f"restarted-{restarted}")
        store.add_run(run_record("run-0"))
        store.add_policy(policy(0, run="run-0"))
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
