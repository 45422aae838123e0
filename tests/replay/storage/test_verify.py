"""Every row is read, and what is wrong is named: flipped bits and dangling names."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from replay import CorruptTrajectory, ReplayStore, questions
from replay.errors import DamagedDatabase
from replay.questions import chosen
from replay.sampling.samplers import make_sampler
from tests.fakes.records import RUN, FreshRows, iterate, new_store, request, sql
from tests.fakes.replay_command import listed
from tests.replay.storage.damaged_buffers import EVALUATED


@pytest.fixture
def filled(store: ReplayStore) -> ReplayStore:
    """Three iterations of 8 rows."""
    for iteration in (1, 2, 3):
        iterate(store, iteration, make_sampler("uniform", 0), count=2)
    return store


def test_rows_that_a_resume_orphaned_are_whole(filled: ReplayStore) -> None:
    filled.resume(RUN, 1)
    found = filled.verify()
    assert (found.states, found.checked, found.corrupt) == ({"eligible": 8, "orphaned": 16}, 24, {})
    assert filled.verify(chosen(None, "iteration == 1")).checked == 8


# The change, and the iteration and slot of each row that is corrupt then, with the reason.
@pytest.mark.parametrize(
    ("change", "rows", "reason"),
    [
        # As of rows that were changed on purpose: docs/replay.md.
        ("update trajectories set record_checksum = null, num_action_tokens = 99", (2, 3), "num_action_tokens must"),
        ("update trajectories set record_checksum = null, mean_behavior_log_prob = -9", (1, 0), "mean_behavior_log"),
        ("update trajectories set num_tokens = 99", (1, 2), "a record of another checksum"),
        ("delete from segments", (2, 0), "other segments than were written"),
        ("delete from messages", (2, 0), "0 messages where 5 were written"),
        # Values that no writer would store.
        ("update trajectories set reward = 'abc'", (2, 0), ""),
        ("update trajectories set stop_reason = x'ff'", (2, 0), ""),
        ("update segments set num_tokens = 'x'", (2, 0), ""),
        ("update segments set tokens = 'text'", (2, 0), ""),
        ("update messages set said = 5", (2, 0), ""),
        ("update messages set num_messages = 4", (2, 0), ""),
    ],
)
def test_row_that_is_not_what_was_written_is_named(
    filled: ReplayStore, change: str, rows: tuple[int, int], reason: str
) -> None:
    ((id,),) = sql(filled, "select id from trajectories where iteration = ? and slot = ?", *rows)
    sql(filled, f"{change} where {'id' if 'trajectories' in change else 'trajectory'} = ?", id)
    found = filled.verify()
    assert list(found.corrupt) == [id] and reason in found.corrupt[id]
    other = sql(filled, "select id from trajectories where id <> ? limit 1", id)[0][0]
    assert filled.read([other])[0].id == other
    assert next(row["id"] for row in listed(filled, filter=f"id == '{other}' and 'drawer' in text")) == other
    if "record_checksum" not in change:
        with pytest.raises(CorruptTrajectory, match=f"^trajectory {id} "):
            filled.read([other, id])


def test_table_of_authors_that_is_not_the_one_its_hash_is_of_is_told(filled: ReplayStore) -> None:
    """Whoever reads it is told: a bit more or less in it would train on other tokens."""
    sql(filled, "update runs set authors = replace(authors, '\"trained\":true', '\"trained\":false')")
    message = "another table than runs.authors_hash is of in runs.authors of run 'run-1'"
    asks: list[Callable[[ReplayStore], object]] = [
        lambda opened: opened.run(RUN),
        lambda opened: opened.draw(request(4, 2), make_sampler("uniform", 0)),
        lambda opened: FreshRows(4).append_to(opened),
    ]
    for ask in asks:
        with closing(ReplayStore.open(filled.path or "")) as opened, pytest.raises(DamagedDatabase, match=message):
            ask(opened)
    found = filled.verify()
    assert (found.checked, found.corrupt, found.damage) == (24, {}, [message])


def draw_all(store: ReplayStore) -> list[object]:
    return [*store.draw(request(4, 9), make_sampler("success", 0))]


@pytest.mark.parametrize(
    ("change", "damage"),
    [
        ("metrics set value = 'abc'", "metrics.value: 3"),
        ("metrics set name = '\ue000json:{'", "metrics.name: 1"),
        ("trajectories set advantage = 9e999", "trajectories.advantage: 24"),
        ("runs set config = '{'", "runs.config: 1"),
        ("draws set drift_mean = 9e999", "draws.drift_mean: 28"),
        ("draws set stream = cast(x'ff' as text)", "draws.stream: 28"),
        ("groups set size = 0", "groups.size: 6"),
    ],
)
def test_whatever_stops_a_question_is_named_by_verify(filled: ReplayStore, change: str, damage: str) -> None:
    """Types, escapes, figures that are not finite, JSON, bytes that are no UTF-8, and bounds."""
    sql(filled, f"update {change}" + (" where iteration = 1" if "name" in change else ""))
    asks: list[Callable[[ReplayStore], object]] = [
        questions.summary,
        questions.runs,
        draw_all,
        lambda given: questions.progress(given, given.run(RUN)),
        lambda given: questions.metric_series(given, RUN),
        lambda given: json.dumps(questions.iteration(given, RUN, 2), allow_nan=False),
    ]
    with closing(ReplayStore.open(filled.path or "")) as opened:
        for ask in asks:
            with suppress(DamagedDatabase), opened.naming_damage():
                ask(opened)
        assert f"{damage} hold what nobody can have written there" in opened.verify().damage


@pytest.mark.parametrize(
    ("change", "column", "where"),
    [
        (
            "trajectories set advantage = '?' where iteration = 1 and slot = 0",
            "advantage",
            "iteration = 1 and slot = 0",
        ),
        ("groups set size = '?' where iteration = 1", "size", "iteration = 1"),
    ],
)
def test_rows_that_stop_a_draw_are_set_aside_by_verify(
    filled: ReplayStore, change: str, column: str, where: str
) -> None:
    wanted = sql(filled, f"select id from trajectories where {where} order by id")
    sql(filled, f"update {change}")
    with closing(ReplayStore.open(filled.path or "")) as opened:
        with pytest.raises(DamagedDatabase, match=rf"\.{column} at .*: it is damaged. .*replay verify$"):
            draw_all(opened)
        opened.quarantine(opened.verify().corrupt)
        assert draw_all(opened)
        assert sql(opened, "select id from trajectories where state = 'quarantined' order by id") == wanted


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


def test_names_of_missing_rows_are_counted(filled: ReplayStore) -> None:
    sql(filled, "delete from trajectories where iteration = 1 and slot = 0")
    ((drawn,),) = sql(filled, "select count(*) from draws where trajectory not in (select id from trajectories)")
    # Its messages and one segment; plain sqlite3 looks after no names.
    assert filled.verify().dangling == {"draws.trajectory": drawn, "messages.trajectory": 1, "segments.trajectory": 1}


def test_damaged_index_of_a_file_is_told(filled: ReplayStore) -> None:
    path = filled.path
    assert path is not None
    filled.close()
    ((root,),) = sql(path, "select rootpage from sqlite_master where name = 'trajectories_by_task'")
    ((size,),) = sql(path, "pragma page_size")
    with path.open("r+b") as file:
        file.seek((root - 1) * size + 3)
        file.write(b"\x00\x00")
    with closing(ReplayStore.open(path, read_only=True)) as opened:
        assert opened.verify().damage


def test_counts_and_blobs_that_nothing_is_drawn_by_are_told(store: ReplayStore) -> None:
    iterate(store, 1, make_sampler("uniform", 0))
    store.keep_held_out(RUN, [EVALUATED], evaluations=1)
    rows = FreshRows(1, rates=(0.5, 0.25)).trajectories
    store.add_scores(RUN, 1, {(row.id, 0): np.zeros(6, np.float32) for row in rows})
    assert store.verify().damage == []
    sql(store, "update trajectories set uses = uses + 1 where slot < 3")
    sql(store, "update held_out set checksum = checksum + 1")
    sql(store, "update token_scores set log_probs = ? where trajectory = ?", bytes(12), rows[1].id)
    assert store.verify().damage == [
        "trajectories.uses: 3 rows were used another number of times, by their draws",
        "token_scores: 1 are not what was written",
        "held_out: 1 are not what was written",
    ]
