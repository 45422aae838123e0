import json
import random
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay import CorruptTrajectory, ReplayError, ReplayStore, questions
from replay.errors import DamagedDatabase
from replay.questions import chosen
from replay.records import Trajectory
from replay.storage.format.encoding import content_hash
from replay.storage.sessions import OpenSession
from tests.fakes.records import RUN, Fresh, draw, iterate, new_store, put, session_row, sql, trajectory
from tests.fakes.replay_command import listed
from tests.replay.storage.filled_buffers import EVALUATED, QUESTIONS, fill

PAGE = 4096


@pytest.fixture
def filled(store: ReplayStore) -> ReplayStore:
    for iteration in (1, 2, 3):
        iterate(store, iteration, count=2)
    return store


def draw_all(store: ReplayStore) -> list[object]:
    return [*draw(store, 4, 9, "success")]


def test_rows_that_a_resume_orphaned_are_whole(filled: ReplayStore) -> None:
    filled.resume(RUN, 1)
    found = filled.verify()
    assert (found.states, found.checked, found.corrupt) == ({"eligible": 8, "orphaned": 16}, 24, {})
    assert filled.verify(chosen(None, "iteration == 1")).checked == 8


# The change, and the iteration and slot of each row that is corrupt then, with the reason.
@pytest.mark.parametrize(
    ("what", "rows", "reason"),
    [
        ("update trajectories set num_tokens = 99", (1, 2), "a record of another checksum"),
        ("delete from segments", (2, 0), "other segments than were written"),
        ("delete from messages", (2, 0), "0 messages where 5 were written"),
        # As of a row that was changed on purpose: docs/running-the-buffer.md.
        ("update trajectories set record_checksum = null, content_hash = 'x'", (2, 3), "tokens of another content"),
        # Values that no writer would store.
        ("update trajectories set reward = 'abc'", (2, 0), ""),
        ("update trajectories set stop_reason = x'ff'", (2, 0), ""),
        ("update segments set num_tokens = 'x'", (2, 0), ""),
        ("update segments set tokens = 'text'", (2, 0), ""),
        ("update messages set said = 5", (2, 0), ""),
        ("update messages set num_messages = 4", (2, 0), ""),
    ],
)
def test_row_not_written_so_is_named(filled: ReplayStore, what: str, rows: tuple[int, int], reason: str) -> None:
    ((id,),) = sql(filled, "select id from trajectories where iteration = ? and slot = ?", *rows)
    sql(filled, f"{what} where {'id' if 'trajectories' in what else 'trajectory'} = ?", id)
    found = filled.verify()
    assert list(found.corrupt) == [id] and reason in found.corrupt[id]
    other = sql(filled, "select id from trajectories where id <> ? limit 1", id)[0][0]
    assert filled.read([other])[0].id == other
    assert next(row["id"] for row in listed(filled, filter=f"id == '{other}' and 'drawer' in text")) == other
    with pytest.raises(CorruptTrajectory, match=f"^trajectory {id} "):
        filled.read([other, id])


def test_table_of_authors_that_is_not_the_one_its_hash_is_of_is_told(filled: ReplayStore) -> None:
    """Whoever reads it is told: a bit more or less in it would train on other tokens."""
    sql(filled, "update runs set authors = replace(authors, '\"trained\":true', '\"trained\":false')")
    message = "another table than runs.authors_hash is of in runs.authors of run 'run-1'"
    asks: list[Callable[[ReplayStore], object]] = [ReplayStore.run, draw_all, Fresh(4).append_to]
    for ask in asks:
        with closing(ReplayStore.open(filled.path or "")) as opened, pytest.raises(DamagedDatabase, match=message):
            ask(opened)
    found = filled.verify()
    assert (found.checked, found.corrupt, found.damage) == (24, {}, [message])


@pytest.mark.parametrize(
    ("change", "damage"),
    [
        ("metrics set value = 'abc'", "metrics.value: 3"),
        ("metrics set name = '\ue000json:{' where iteration = 1", "metrics.name: 1"),
        ("trajectories set advantage = 9e999", "trajectories.advantage: 24"),
        ("runs set config = '{'", "runs.config: 1"),
        ("draws set stream = cast(x'ff' as text)", "draws.stream: 28"),
        ("groups set size = 0", "groups.size: 6"),
        ("buffer_state set value = -1 where name = 'changed'", "buffer_state.value: 1"),
    ],
)
def test_whatever_stops_a_question_is_named_by_verify(filled: ReplayStore, change: str, damage: str) -> None:
    """Types, escapes, figures that are not finite, JSON, bytes that are no UTF-8, and bounds."""
    sql(filled, f"update {change}")
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
    "table,column,where", [("trajectories", "uses", "iteration = 1 and slot = 0"), ("groups", "size", "iteration = 1")]
)
def test_rows_that_stop_draws_are_set_aside_by_verify(filled: ReplayStore, table: str, column: str, where: str) -> None:
    wanted = sql(filled, f"select id from trajectories where {where} order by id")
    sql(filled, f"update {table} set {column} = '?' where {where}")
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
    Fresh(1, rates=(0.5,) * 40).append_to(store)
    emptied = []

    def empty(*_: object) -> None:
        ((busy, _, _),) = sql(path, "pragma wal_checkpoint(truncate)")
        emptied.append(not busy)

    sa.event.listen(sa.Engine, "checkin", empty)
    try:
        assert store.verify().checked == 160
    finally:
        sa.event.remove(sa.Engine, "checkin", empty)
    # Three batches of rows, and what else is looked at.
    assert len(emptied) > 20 and all(emptied)


def test_names_of_missing_rows_are_counted(filled: ReplayStore) -> None:
    sql(filled, "delete from trajectories where iteration = 1 and slot = 0")
    ((drawn,),) = sql(filled, "select count(*) from draws where trajectory not in (select id from trajectories)")
    # Its messages and one segment; plain sqlite3 looks after no names.
    counts = {"draws.trajectory": drawn, "messages.trajectory": 1, "segments.trajectory": 1}
    lines = {f"{count} rows whose {name} names a missing one" for name, count in counts.items()}
    assert set(filled.verify().damage) == lines


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
    iterate(store, 1)
    store.keep_held_out(RUN, [EVALUATED], evaluations=1)
    rows = Fresh(1, rates=(0.5, 0.25)).trajectories
    store.add_scores(RUN, 1, {(row.id, 0): np.zeros(6, np.float32) for row in rows})
    assert store.verify().damage == []
    sql(store, "update trajectories set uses = uses + 1 where slot < 3")
    sql(store, "update held_out set checksum = checksum + 1")
    sql(store, "update token_scores set log_probs = ? where trajectory = ?", bytes(12), rows[1].id)
    sql(store, "update token_scores set position = 3 where trajectory = ?", rows[2].id)
    assert store.verify().damage == [
        "trajectories.uses: 3 rows were used another number of times, by their draws",
        "token_scores: 2 are not what was written",
        "held_out: 1 are not what was written",
    ]


@pytest.mark.parametrize("change", ["kept_tokens = 9999", "parent = 99", "tokens = ?", "checksum = 1"])
def test_damaged_session_that_is_under_way_is_told_and_never_gone_on_with(store: ReplayStore, change: str) -> None:
    row = session_row("agent")
    for id in ("whole", "damaged"):
        store.sessions.open(OpenSession(id, RUN, "2026-01-01"))
        store.sessions.add([(id, node) for node in row.nodes])
    assert store.verify().damage == []
    blobs = [bytes(40)] if "?" in change else []
    sql(store, f"update session_nodes set {change} where session = 'damaged' and number = 1", *blobs)
    assert store.verify().damage == ["sessions: 1 are not what was written"]
    with pytest.raises(ReplayError, match="session damaged must read back as it was written, got"):
        store.sessions.nodes("damaged")
    assert len(store.sessions.nodes("whole")) == len(row.nodes)


def test_change_that_takes_the_checksum_away_is_meant(filled: ReplayStore) -> None:
    ((id,),) = sql(filled, "select id from trajectories where iteration = 1 and slot = 0")
    sql(filled, "update trajectories set reward = 0.25, record_checksum = null where id = ?", id)
    assert filled.read([id])[0].record.reward == 0.25
    assert filled.verify().corrupt == {}


@pytest.mark.every_database
@given(reward=st.floats(-1e6, 1e6), entropy=st.none() | st.floats(0, 9), text=st.text(max_size=9))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_checksum_of_any_record_holds(store: ReplayStore, reward: float, entropy: float | None, text: str) -> None:
    """Also what databases write otherwise than Python: whole numbers as reals, a negative zero, a NUL."""
    id = f"{reward}/{entropy}/{text}"
    made = trajectory(id, slot=0, group=id, reward=reward, mean_entropy=entropy, stop_reason=text)
    whole = trajectory(f"{id}/whole", slot=1, group=id, reward=-0.0, advantage=3, stop_reason=text)
    put(store, made, whole)
    assert [row.id for row in store.read([id, f"{id}/whole"])] == [id, f"{id}/whole"]


def torn(file: bytes, chance: random.Random) -> bytes:
    """Cut, or with a page of zeros or noise."""
    kind, start = chance.choice(["cut", "zeros", "noise"]), PAGE * chance.randrange(len(file) // PAGE)
    if kind == "cut":
        return file[: chance.randrange(len(file))]
    return file[:start] + (bytes(PAGE) if kind == "zeros" else chance.randbytes(PAGE)) + file[start + PAGE :]


def flipped(file: bytes, chance: random.Random) -> bytes:
    """One bit is another one."""
    changed = bytearray(file)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def facts(row: Trajectory) -> tuple[str, object, str]:
    return row.id, replace(row.record, state=""), content_hash(row.segments)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [torn, flipped])
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 2_000), marks=pytest.mark.soak)], ids=str)
def test_damaged_file_gives_what_was_written_or_an_error_of_one_line(
    tmp_path: Path, damage: Callable[[bytes, random.Random], bytes], seeds: range
) -> None:
    whole, path = tmp_path / "whole.sqlite", tmp_path / "damaged.sqlite"
    fill(whole)
    ids = [id for (id,) in sql(whole, "select id from trajectories where state not in ('evicted', 'orphaned')")]
    with closing(ReplayStore.open(whole)) as store:
        written = [facts(row) for row in store.read(ids)]
    sql(whole, "pragma wal_checkpoint(truncate)")
    file, refused = whole.read_bytes(), list[str]()

    def ask(question: Callable[[ReplayStore], Any]) -> Any:
        """None: it was refused."""
        try:
            with closing(ReplayStore.open(path)) as store:
                return question(store)
        except ReplayError as error:
            refused.append(str(error))

    for seed in seeds:
        chance = random.Random(seed)
        path.write_bytes(damage(file, chance))
        before, verified = len(refused), ask(ReplayStore.verify)
        for question in chance.sample([*QUESTIONS.values()], 4):
            ask(question)
        rows = [row.trajectory for row in ask(lambda store: draw(store, 5, 30, "success")) or ()]
        rows += ask(lambda store: store.read(chance.sample(ids, 2))) or []  # noqa: B023  asked at once
        assert all(facts(row) in written for row in rows), seed
        found = verified is None or verified.corrupt or verified.damage
        assert found or not any("replay verify" in said for said in refused[before:]), seed
        for side in ("-wal", "-shm"):
            path.with_name(path.name + side).unlink(missing_ok=True)
    assert refused and not any("\n" in said for said in refused)
