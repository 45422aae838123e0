import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from context.authors import LLM, USER, Author, AuthorTable
from context.tokens.token_sequence import Segment, TokenSequence
from replay import BatchRow, DrawRequest, InvalidRecord, Limits, Pick, ReplayError, ReplayStore, make_sampler
from replay.storage.counters import LEASE_DRAWS
from replay.storage.staleness import may_be_fresh
from tests.fakes.records import (
    AUTHORS,
    RUN,
    SHORT,
    Fresh,
    a_run,
    add_run,
    iterate,
    iteration_record,
    new_store,
    policy,
    put,
    request,
    set_state,
    sql,
    tokens,
    trajectory,
)


def asked(iteration: int, *picks: Pick, **limits: Any) -> DrawRequest:
    return DrawRequest(RUN, iteration, iteration - 1, picks, limits=Limits(**{"successful_only": False, **limits}))


def draw(store: ReplayStore, iteration: int, count: int = 99, **limits: Any) -> list[BatchRow]:
    return store.draw(asked(iteration, Pick(count), **limits), make_sampler("uniform", iteration))


def available(store: ReplayStore, iteration: int, **limits: Any) -> int:
    return store.available(asked(iteration, **limits), make_sampler("uniform", 0)).rows


def use(store: ReplayStore, iteration: int, count: int = 99, **limits: Any) -> list[str]:
    drawn = draw(store, iteration, count, **limits)
    store.commit(iteration_record(iteration, replay=len(drawn)), [row.draw for row in drawn], sampler_state={})
    return [row.trajectory.id for row in drawn]


def iterations(drawn: list[BatchRow]) -> Counter[int]:
    return Counter(row.trajectory.record.iteration for row in drawn)


def drawn_by(store: ReplayStore, *picks: Pick) -> list[BatchRow]:
    return store.draw(replace(request(9, 0), picks=picks), make_sampler("uniform", 5))


def test_draw_reserves_slots_with_probability_and_staleness(store: ReplayStore) -> None:
    Fresh(1, rates=(0.5, 0.75)).append_to(store)
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
        Fresh(iteration).append_to(store)
    sampler = make_sampler("uniform", 0)
    assert store.available(request(1, 1), sampler).rows == 0
    assert store.draw(request(1, 5), sampler) == []
    assert {row.trajectory.record.iteration for row in store.draw(request(2, 99), sampler)} == {1}


def test_commit_writes_statistics_iteration_metrics_and_sampler_together(store: ReplayStore) -> None:
    sampler = make_sampler("success", 0)
    iterate(store, 1, sampler)
    drawn = iterate(store, 2, sampler)
    rows = sql(store, "select trajectory, state, token_gap_max, staleness from draws where iteration=2 and slot>=8")
    assert rows == [(id, "committed", 1.5, 1) for id in drawn]
    assert sql(store, "select fresh, replay, optimizer_steps from iterations") == [(8, 0, 2), (8, 2, 2)]
    found = sql(store, "select iteration, name, value from metrics order by 1")
    assert found == [(1, "actor/grad_norm", 0.5), (2, "actor/grad_norm", 1.0)]
    states = sql(store, "select state from sampler_state order by iteration")
    assert json.loads(states[1][0]) == sampler.state()


def test_commit_of_other_draws_or_numbers_changes_nothing(store: ReplayStore) -> None:
    fresh, record = Fresh(1).append_to(store).draws(), replace(iteration_record(1, replay=0), fraction=0.1)
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
    Fresh(1, size=8).append_to(store)
    again = asked(2, Pick(6), max_uses=1)
    store.draw(again, make_sampler("uniform", 1))
    more = store.draw(again, make_sampler("uniform", 2))
    # The eight rows are all there to choose from.
    assert len(more) == 6
    assert sql(store, "select slot, trajectory from draws order by 1") == [(r.draw.slot, r.trajectory.id) for r in more]


def test_resume_goes_back_to_the_checkpoint(store: ReplayStore) -> None:
    sampler = make_sampler("success", 0)
    iterate(store, 1, sampler)
    iterate(store, 2, sampler)
    kept = sampler.state()
    iterate(store, 3, sampler)
    # A crash between the draw and the update of iteration 4.
    collected = Fresh(4, rates=(0.5, 0.25)).append_to(store)
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


def test_picks_are_served_in_order_and_no_row_twice(store: ReplayStore) -> None:
    Fresh(1, rates=(0.5,)).append_to(store)
    taught = [trajectory(f"b{slot}", group="g2", task="task-2", slot=slot, source="teacher") for slot in (10, 11)]
    put(store, *taught)
    drawn = drawn_by(store, Pick(1, source="teacher"), Pick(2, task="task-1"), Pick(9, source="teacher"), Pick(9))
    # One of the two teacher's rows, two of the other task, the teacher's last one, then the two that are left.
    places = [(row.trajectory.record.source, row.trajectory.record.task) for row in drawn]
    teacher, own = ("teacher", "task-2"), ("self", "task-1")
    assert places == [teacher, own, own, teacher, own, own]
    assert len({row.trajectory.id for row in drawn}) == 6
    assert [row.draw.slot for row in drawn] == [8, 9, 10, 11, 12, 13]


def test_group_picks_give_whole_groups_and_never_a_part(store: ReplayStore) -> None:
    Fresh(1, rates=(0.5, 0.25, 1.0), size=4).append_to(store)
    gone = store.read([row.trajectory.id for row in drawn_by(store, Pick(99))])
    gone_id = next(row.id for row in gone if row.record.group == "run-1-1-0-2")
    store.resume(RUN, 1)
    set_state(store, gone_id, "evicted")
    drawn = drawn_by(store, Pick(7, unit="group"), Pick(99, unit="group"))
    # Seven rows hold one group of four; the second pick takes the other; the third group has lost a member.
    groups = [row.trajectory.record.group for row in drawn]
    assert sorted(groups) == ["run-1-1-0-0"] * 4 + ["run-1-1-0-1"] * 4
    assert len(set(groups[:4])) == 1
    assert {row.draw.probability for row in drawn} == {0.5, 1.0}


def test_a_group_weighs_the_mean_of_its_members(store: ReplayStore) -> None:
    """Rewards of 1 and 0 weigh e and 1: one of four is (e + 3) / 4, two of four are (2 e + 2) / 4."""
    Fresh(1, rates=(0.25, 0.5), size=4).append_to(store)
    picks = (Pick(4, unit="group"),)
    drawn = store.draw(replace(request(9, 0), picks=picks), make_sampler("reward", 5))
    weights = {"run-1-1-0-0": np.e + 3, "run-1-1-0-1": 2 * np.e + 2}
    (group,) = {row.trajectory.record.group for row in drawn}
    assert [row.draw.probability for row in drawn] == pytest.approx([weights[group] / sum(weights.values())] * 4)


def test_a_rows_loss_is_weighed_by_the_correction_of_its_sampler(store: ReplayStore) -> None:
    """(N p)^-beta of prioritised replay, over the largest of the draw."""
    put(store, *(trajectory(f"b{slot}", slot=slot, advantage=slot + 1.0) for slot in range(8)))
    drawn = store.draw(request(2, 4), make_sampler("advantage", 1, {"exponent": 1.0, "beta": 0.5}))
    corrections = [(8 * (row.draw.probability or 0.0)) ** -0.5 for row in drawn]
    assert [row.draw.weight for row in drawn] == pytest.approx([each / max(corrections) for each in corrections])
    assert len(set(corrections)) == 4


def test_availability_counts_rows_and_complete_groups_by_source_and_task(store: ReplayStore) -> None:
    Fresh(1, rates=(0.5, 0.25), size=4).append_to(store)
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
    Fresh(1).append_to(store)
    with pytest.raises(InvalidRecord, match=f"^{next(iter(numbers))} must be "):
        store.draw(replace(request(2, 1), **numbers), make_sampler("uniform", 0))


def test_a_run_draws_its_own_rows_and_imported_ones(store: ReplayStore) -> None:
    add_run(store, "run-0")
    Fresh(1).append_to(store)
    for iteration, source in enumerate(("self", "gateway", "earlier", "hindsight"), start=1):
        Fresh(iteration, run="run-0", source=source).append_to(store)
    # Four of its own and four that were imported; the other run collected twelve.
    assert available(store, 9) == available(store, 9, sources=("self", "earlier")) == 8
    drawn = store.draw(asked(9, Pick(99, source="self"), Pick(99, source="earlier")), make_sampler("uniform", 0))
    assert [row.trajectory.record.run for row in drawn] == [RUN] * 4 + ["run-0"] * 4
    assert {row.draw.staleness for row in drawn[4:]} == {None}


def test_staleness_is_bounded_but_in_other_runs(store: ReplayStore) -> None:
    for iteration in range(1, 7):
        Fresh(iteration).append_to(store)
    # Iteration i was collected by policy i - 1; iteration 7 is about to train policy 6.
    assert iterations(draw(store, 7, max_staleness=3)) == {4: 4, 5: 4, 6: 4}
    assert available(store, 8, max_staleness=3) == 8
    add_run(store, "run-0")
    Fresh(1, run="run-0", source="earlier").append_to(store)
    assert available(store, 20, max_staleness=1) == 4
    # Groups are fresh within their bound, also where a resume took weights back.
    assert [may_be_fresh(ages, 2) for ages in ([0, 2], [1, 3], [-2, 0], [-3])] == [True, False, True, False]


def test_max_uses_counts_committed_draws_and_reservations(store: ReplayStore) -> None:
    Fresh(1, size=8).append_to(store)
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
    Fresh(1, size=8).append_to(store)
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


def test_caps_hold_within_one_draw(store: ReplayStore) -> None:
    Fresh(1, rates=(0.5, 0.5, 0.5)).append_to(store)
    put(store, trajectory("z", group="g", task="task-2", slot=50))
    drawn = Counter(row.trajectory.record.group for row in draw(store, 2, per_group=2))
    assert drawn == {"run-1-1-0-0": 2, "run-1-1-0-1": 2, "run-1-1-0-2": 2, "g": 1}
    for iteration, picks, cap in ((3, (Pick(99),), 4), (4, (Pick(2, task="task-1"), Pick(9)), 3)):
        found = store.draw(asked(iteration, *picks, per_task=cap), make_sampler("uniform", 0))
        assert Counter(row.trajectory.record.task for row in found) == {"task-1": cap, "task-2": 1}
    sql(store, "update segments set tokens = ? where trajectory like '%1-1-0-0-0'", bytes(40))
    assert len(draw(store, 8, per_group=3)) == 10  # what can't be read fills no cap
    caps = [{"per_task": 4}, {"per_group": 2}, {"per_group": 1, "per_task": 2}]
    assert [available(store, 4, **limits) for limits in caps] == [5, 7, 3]


EVERYTHING = ("tokenizer", "template", "model_family", "vocab_size", "logprobs_mode", "top_p", "top_k")
JUDGED = AuthorTable([*AUTHORS.authors, Author("judge", action=False, trained=False)])


@pytest.mark.parametrize("field", [*EVERYTHING, "authors"])
def test_rows_that_mean_something_else_are_left_out_and_refused_by_name(store: ReplayStore, field: str) -> None:
    """Four rows of another run: of another tokenizer, say, or with log-probs of another kind."""
    print: dict[str, object] = {"tokenizer": "t", "template": "p", "model_family": "m", "vocab_size": 11}
    own, other = replace(a_run(), id="mine", fingerprint=print), replace(a_run("run-0"), fingerprint=print)
    if field == "authors":
        other = replace(other, authors=JUDGED.to_json(), authors_hash=JUDGED.hash)
    elif field in print:
        other = replace(other, fingerprint=print | {field: 12})
    for run in (own, other):
        store.add_run(run)
        rows = Fresh(1, run=run.id, source="self" if run is own else "earlier")
        if run is other and field in EVERYTHING[4:]:
            kind = {"logprobs_mode": "processed", "top_p": 0.9, "top_k": 50}[field]
            changed = [replace(row, record=replace(row.record, **{field: kind})) for row in rows.trajectories]
            rows.trajectories = changed
        rows.append_to(store)
    mine = replace(asked(2), run="mine")
    found = store.available(mine, make_sampler("uniform", 0))
    assert (found.rows, found.incomparable) == (4, {field: 4})
    with pytest.raises(ReplayError, match=rf"source 'earlier' must .* another {field}.*allow_mismatch: \[{field}\]"):
        store.draw(replace(mine, picks=(Pick(1, source="earlier"),)), make_sampler("uniform", 0))
    allowed = replace(mine, limits=Limits(successful_only=False, allow_mismatch=EVERYTHING))
    assert store.available(allowed, make_sampler("uniform", 0)).rows == (4 if field == "authors" else 8)


def test_a_row_beyond_the_vocabulary_of_the_run_that_draws_is_quarantined(store: ReplayStore) -> None:
    """Its own run says nothing of a vocabulary."""
    store.add_run(replace(a_run("small"), fingerprint={"vocab_size": 10}))
    store.add_policy(policy(0, run="small"))
    short = Segment(tokens([9, 8], [USER, LLM]))
    put(store, trajectory("beyond", source="x"), trajectory("within", segments=(short,), slot=1, source="x"))
    drawn = store.draw(replace(asked(2, Pick(2)), run="small"), make_sampler("uniform", 0))
    assert [row.trajectory.id for row in drawn] == ["within"]
    reason = "token 10 beyond the 10 of the vocabulary of run small"
    found = sql(store, "select state, state_reason from trajectories where id = 'beyond'")
    assert found == [("quarantined", reason)]


def test_a_damaged_number_of_a_row_hides_no_later_ones(store: ReplayStore) -> None:
    first = Fresh(1).append_to(store)
    sql(store, "update trajectories set changed = 9000000000 where id = ?", first.trajectories[0].id)
    assert available(store, 2) == 4
    Fresh(2).append_to(store)
    assert available(store, 3) == 8


def places(drawn: list[BatchRow]) -> list[tuple[str, int, int, float | None]]:
    return [(row.draw.trajectory, row.draw.slot, row.draw.iteration, row.draw.probability) for row in drawn]


SAMPLERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("uniform", {}, {"max_staleness": 5, "max_uses": 2}),
    ("recency", {"half_life": 1.5}, {"per_group": 1}),
    ("success", {}, {}),
    ("difficulty", {"sigma": 2.0}, {}),
    ("advantage", {}, {"per_task": 3}),
    ("entropy", {"pool": 2}, {}),
    ("freshness", {"tau": 2.0}, {"max_uses": 3}),
]


@pytest.mark.parametrize("name, options, limits", SAMPLERS, ids=[name for name, *_ in SAMPLERS])
def test_draws_are_the_same_after_a_restart_and_after_refreshes(
    tmp_path: Path, name: str, options: dict[str, Any], limits: dict[str, Any]
) -> None:
    outcomes = []
    for restarted in (False, True):
        store = new_store(tmp_path / f"restarted-{restarted}")
        add_run(store, "run-0")
        sampler, found = make_sampler(name, 3, options), []
        for iteration in range(1, 8):
            rates = ((0.5, 0.25), (1.0, 0.75), (0.0, 0.5))[iteration % 3]
            Fresh(iteration, rates=rates).append_to(store)
            if iteration % 3 == 0:
                # Lands before everything this run has collected.
                other = Fresh(iteration // 3, run="run-0", source="earlier", rates=(0.5,)).append_to(store)
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


def test_rows_that_nothing_can_score_or_the_context_has_no_room_for_are_not_drawn_and_counted(
    store: ReplayStore,
) -> None:
    one, two = (tuple(Segment(SHORT) for _ in range(count)) for count in (1, 2))
    long = (Segment(SHORT), Segment(TokenSequence.concatenate([SHORT, SHORT])))
    rows = [trajectory("one", segments=one), trajectory("two", segments=two), trajectory("long", segments=long)]
    put(store, *rows, trajectory("greedy", temperature=0.0))
    assert {row.trajectory.id for row in draw(store, 2, max_tokens=len(SHORT))} == {"one", "two"}
    found = store.available(asked(2, max_tokens=len(SHORT)), make_sampler("uniform", 0))
    assert (found.rows, found.incomparable) == (2, {"temperature": 1, "context.max_tokens": 1})
    assert {row.trajectory.id for row in draw(store, 3, max_tokens=2 * len(SHORT))} == {"one", "two", "long"}
