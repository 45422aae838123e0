"""Every row is read, and what is wrong is named: faults F12 and dangling names."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from replay import ReplayStore, questions
from replay.errors import DamagedDatabase
from replay.questions import chosen
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from tests.fakes.records import RUN, FreshRows, iterate, new_store, request, sql
from tests.replay.storage.damaged_buffers import EVALUATED


def filled(location: Location, iterations: int = 3) -> ReplayStore:
    store = new_store(location)
    for iteration in range(1, iterations + 1):
        iterate(store, iteration, make_sampler("uniform", 0), count=2)
    return store


def test_rows_that_a_resume_orphaned_are_whole(location: Location) -> None:
    store = filled(location)
    store.resume(RUN, 1)
    found = store.verify()
    assert (found.states, found.checked, found.corrupt) == ({"eligible": 8, "orphaned": 16}, 24, {})
    sql(store, "update trajectories set record_checksum = null, num_tokens = 99 where iteration = 3 and slot = 0")
    assert len(store.verify().corrupt) == 1


def test_numbers_that_are_not_those_of_the_tokens_are_named(location: Location) -> None:
    store = filled(location)
    # As of rows that were changed on purpose.
    changed = "update trajectories set record_checksum = null"
    sql(store, f"{changed}, num_action_tokens = 99 where iteration = 2 and slot = 3")
    sql(store, f"{changed}, mean_behavior_log_prob = -9 where iteration = 1 and slot = 0")
    found = store.verify()
    places = {sql(store, "select iteration, slot from trajectories where id = ?", id)[0] for id in found.corrupt}
    assert places == {(1, 0), (2, 3)}
    assert any("num_action_tokens must" in reason for reason in found.corrupt.values())


def test_rows_without_content_are_counted_and_not_read(location: Location) -> None:
    store = filled(location)
    sql(store, "update trajectories set state = 'quarantined' where iteration = 1 and slot < 2")
    evicted = "(select id from trajectories where iteration = 2 and slot = 0)"
    for table in ("messages", "segments"):
        sql(store, f"delete from {table} where trajectory in {evicted}")
    sql(store, "update trajectories set state = 'evicted' where iteration = 2 and slot = 0")
    found = store.verify()
    assert (found.states, found.checked, found.corrupt) == ({"eligible": 21, "quarantined": 2, "evicted": 1}, 21, {})


@pytest.mark.parametrize(
    ("lost", "reason"),
    [("segments", "other segments than were written"), ("messages", "0 messages where 5 were written")],
)
def test_row_whose_content_is_gone_without_eviction_is_corrupt(location: Location, lost: str, reason: str) -> None:
    store = filled(location)
    one = "select id from trajectories where iteration = 2 and slot = 0"
    sql(store, f"delete from {lost} where trajectory in ({one})")
    assert store.verify().corrupt == {sql(store, one)[0][0]: reason}


def test_table_of_authors_that_is_not_the_one_its_hash_is_of_is_told(location: Location) -> None:
    """Whoever reads it is told: a bit more or less in it would train on other tokens."""
    store = filled(location)
    sql(store, "update runs set authors = replace(authors, '\"trained\":true', '\"trained\":false')")
    told = "got another table than runs.authors_hash is of in runs.authors of run 'run-1': it is damaged"
    asks: list[Callable[[ReplayStore], object]] = [
        lambda opened: opened.run(RUN),
        lambda opened: opened.draw(request(4, 2), make_sampler("uniform", 0)),
        lambda opened: FreshRows(4).append_to(opened),
    ]
    for ask in asks:
        with closing(ReplayStore.open(location)) as opened, pytest.raises(DamagedDatabase, match=told):
            ask(opened)
    found = store.verify()
    assert found.checked == 24 and found.corrupt == {}
    assert found.damage == ["another table than runs.authors_hash is of in runs.authors of run 'run-1'"]


@pytest.mark.parametrize(
    ("change", "damage"),
    [
        ("metrics set value = 'abc'", "metrics.value: 3"),
        ("trajectories set advantage = 9e999", "trajectories.advantage: 24"),
        ("runs set config = '{'", "runs.config: 1"),
        ("draws set drift_mean = 9e999", "draws.drift_mean: 28"),
        ("draws set stream = cast(x'ff' as text)", "draws.stream: 28"),
        ("groups set size = 0", "groups.size: 6"),
    ],
)
def test_whatever_stops_a_question_is_named_by_verify(tmp_path: Path, change: str, damage: str) -> None:
    """Types, figures that are not finite, JSON, bytes that are no UTF-8, and bounds."""
    store = filled(tmp_path / "replay.sqlite")
    sql(store, f"update {change}")
    store.close()
    with closing(ReplayStore.open(tmp_path / "replay.sqlite")) as opened:
        asked = (questions.summary, questions.runs, lambda given: questions.progress(given, given.run(RUN)), draw_all)
        for ask in (*asked, lambda given: questions.metric_series(given, RUN), shown):
            with suppress(DamagedDatabase), opened.naming_damage():
                ask(opened)
        assert f"{damage} hold what nobody can have written there" in opened.verify().damage


def draw_all(store: ReplayStore) -> object:
    return store.draw(request(4, 9), make_sampler("success", 0))


def shown(store: ReplayStore) -> str:
    return json.dumps(questions.iteration(store, RUN, 2), allow_nan=False)


def test_row_that_stops_a_draw_is_set_aside_by_verify(tmp_path: Path) -> None:
    store = filled(tmp_path / "replay.sqlite")
    ((id,),) = sql(store, "select id from trajectories where iteration = 1 and slot = 0")
    sql(store, "update trajectories set advantage = '?' where id = ?", id)
    store.close()
    with closing(ReplayStore.open(store.path or "")) as opened:
        with pytest.raises(DamagedDatabase, match=r"trajectories.advantage at .*: it is damaged. .*replay verify$"):
            draw_all(opened)
        opened.quarantine(opened.verify().corrupt)
        assert len(draw_all(opened)) == 9  # type: ignore[arg-type]
        assert sql(opened, "select id from trajectories where state = 'quarantined'") == [(id,)]


def test_verify_holds_no_snapshot_while_others_write(tmp_path: Path) -> None:
    """The log can be emptied between any two batches of 64 rows."""
    path = tmp_path / "replay.sqlite"
    store = new_store(path)
    FreshRows(1, rates=(0.5,) * 40).append_to(store)
    emptied = []

    def empty(*_: object) -> None:
        ((busy, _, _),) = sql(path, "pragma wal_checkpoint(truncate)")
        emptied.append(not busy)

    sa.event.listen(sa.Engine, "checkin", empty)
    try:
        assert store.verify().checked == 160
    finally:
        sa.event.remove(sa.Engine, "checkin", empty)
    # Three batches of rows, the end of them, and what else is looked at.
    assert len(emptied) > 20 and all(emptied)


def test_filter_narrows_what_is_read(location: Location) -> None:
    store = filled(location)
    sql(store, "update trajectories set num_tokens = 99 where iteration = 2")
    assert store.verify(chosen(None, "iteration == 1")).corrupt == {}
    assert len(store.verify(chosen(None, "iteration == 2 and success")).corrupt) == 3


def test_names_of_missing_rows_are_counted(tmp_path: Path) -> None:
    store = filled(tmp_path / "replay.sqlite")
    sql(store, "delete from trajectories where iteration = 1 and slot = 0")
    ((drawn,),) = sql(store, "select count(*) from draws where trajectory not in (select id from trajectories)")
    # Its messages and one segment; plain sqlite3 looks after no names.
    assert store.verify().dangling == {"draws.trajectory": drawn, "messages.trajectory": 1, "segments.trajectory": 1}


def test_damaged_file_says_so(tmp_path: Path) -> None:
    store = filled(tmp_path / "replay.sqlite")
    store.close()
    ((root,),) = sql(store, "select rootpage from sqlite_master where name = 'trajectories_by_task'")
    ((size,),) = sql(store, "pragma page_size")
    with (tmp_path / "replay.sqlite").open("r+b") as file:
        file.seek((root - 1) * size + 3)
        file.write(b"\x00\x00")
    with_damage = ReplayStore.open(tmp_path / "replay.sqlite", read_only=True)
    assert with_damage.verify().damage
    with_damage.close()


def test_uses_that_are_not_those_of_the_draws_are_told(location: Location) -> None:
    store = filled(location)
    sql(store, "update trajectories set uses = uses + 1 where iteration = 2 and slot < 3")
    assert store.verify().damage == ["trajectories.uses: 3 rows were used another number of times, by their draws"]


def test_blobs_that_nothing_is_drawn_from_are_told(store: ReplayStore) -> None:
    iterate(store, 1, make_sampler("uniform", 0))
    store.keep_held_out(RUN, [EVALUATED], evaluations=1)
    rows = FreshRows(1, rates=(0.5, 0.25)).trajectories
    store.add_scores(RUN, 1, {(row.id, 0): np.zeros(6, np.float32) for row in rows})
    assert store.verify().damage == []
    sql(store, "update held_out set checksum = checksum + 1")
    sql(store, "update token_scores set log_probs = ? where trajectory = ?", bytes(12), rows[1].id)
    assert store.verify().damage == ["token_scores: 1 are not what was written", "held_out: 1 are not what was written"]


@pytest.mark.every_database
@pytest.mark.parametrize("text", ["{", '"plain"'])
def test_mark_of_an_escape_before_what_is_none_is_told_by_column(store: ReplayStore, text: str) -> None:
    """Read as another text it would not be found again: pages ended nowhere."""
    iterate(store, 1, make_sampler("uniform", 0))
    sql(store, "update metrics set name = ?", f"\ue000json:{text}")
    assert store.verify().damage == ["metrics.name: 1 hold what nobody can have written there"]
