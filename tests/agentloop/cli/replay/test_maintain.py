import json
import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from context.messages import Message, ToolCall
from context.tokens.token_sequence import Segment
from replay import ReplayStore
from replay.records import TaskRecord
from replay.storage.databases import Location
from replay.storage.format import schema
from tests.fakes.records import LLM, RUN, USER, Fresh, group, iterated, new_store, put, sql, tokens, trajectory
from tests.fakes.replay_command import ask

SECRET = "the vault opens with 31-07-19"
LONG = "".join(f"{SECRET} number {i}. " for i in range(2000))
"""Over many pages of the file."""
EVICTED = "select count(*) from reclaimed"


def test_prune_tells_first_and_does_it_with_yes(location: Location) -> None:
    iterated(location).close()
    where = "iteration == 1 and not success"
    dry = ask("prune", str(location), "--where", where)
    assert dry.exit_code == 0
    assert dry.output.startswith("would evict 5 rows")
    assert dry.output.endswith("nothing was changed; add --yes to do it\n")
    assert sql(location, EVICTED) == [(0,)]
    done = json.loads(ask("prune", str(location), "--where", where, "--yes", "--json").output)
    assert (done["rows"], done["done"]) == (5, True)
    why = "select distinct iteration, state_reason from reclaimed join groups on groups.id = group_id"
    assert sql(location, why) == [(1, "pruned by where")]
    assert sql(location, "select count(distinct trajectory) from segments") == [(19,)]
    assert ask("prune", str(location), "--where", where, "--yes").output == "evicted 0 rows (0.0 MB)\n"


def test_compact_gives_back_what_pruned_rows_took_and_loses_no_other(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    with closing(iterated(path)) as store:
        long = (Message("user", random.Random(0).randbytes(2_000_000).hex()),)
        put(store, replace(trajectory("long", group="long"), messages=long))
        left = sorted(sql(path, "select id from trajectories where id <> 'long'"))
        store.prune(rows=schema.trajectories.c.id == "long", dry_run=False)
    found = json.loads(ask("compact", str(path), "--json").output)
    assert found["bytes_before"] > 2_000_000 > found["bytes_after"] == path.stat().st_size
    assert sorted(sql(path, "select id from trajectories")) == left
    assert ask("compact", str(path)).output.endswith(" MB\n")


def secretive(location: Location) -> ReplayStore:
    """Three rows: one with secrets in every place text can stand, one with half of them, one without."""
    store = new_store(location)
    shared = Message("system", "You are careful and never tell anybody anything.", author="initialization")
    call = ToolCall("open", {"phrase": f"{SECRET}!"}, "1")
    said = (
        shared,
        Message("user", LONG),
        Message("assistant", "", author="llm", reasoning=f"I recall: {SECRET}.", tool_calls=(call,)),
        Message("tool", f"NUL \x00 {SECRET}", author="env", name="open", tool_call_id="1"),
    )
    long = Segment(tokens([(i * 7919) % 30000 for i in range(3000)], [USER, LLM] * 1500))
    rows = [
        replace(trajectory("a", segments=(long,), group="g1", task="t1"), messages=said),
        replace(trajectory("b", group="g2", task="t2"), messages=(shared, Message("user", "How is the weather?"))),
        replace(trajectory("c", group="g2", task="t2", slot=1), messages=(shared,)),
    ]
    tasks = [
        TaskRecord("t1", "lookup_chain", {"phrase": f"of the task: {SECRET}"}),
        TaskRecord("t2", "lookup_chain", {"phrase": shared.content}),
    ]
    store.append(tasks, [group("g1", task="t1"), group("g2", task="t2")], rows)
    return store


def pieces(content: bytes) -> list[bytes]:
    """Every 16 bytes of it that are its own: not what all blobs begin with, nor what repeats itself."""
    return [content[at : at + 16] for at in range(16, len(content) - 16, 16)]


def leave_deleted_bytes(connection: Any, record: object) -> None:
    """As SQLite does unless it was built otherwise."""
    connection.execute("pragma secure_delete=off")


@pytest.mark.slow
def test_forget_of_some_of_many_rows_leaves_no_byte_of_theirs(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Rows of all sizes share pages; and some were evicted before, whose bytes are in pages that are free."""
    path, chance = tmp_path / "replay.sqlite", random.Random(3)
    said = {f"t{n:03d}": "".join(chance.choices("abcdefgh ", k=chance.choice([30, 400, 9000]))) for n in range(200)}
    rows = [replace(trajectory(id, slot=n), messages=(Message("user", said[id]),)) for n, id in enumerate(said)]
    sa.event.listen(sa.Pool, "connect", leave_deleted_bytes)
    request.addfinalizer(lambda: sa.event.remove(sa.Pool, "connect", leave_deleted_bytes))
    with closing(new_store(path)) as store:
        put(store, *rows)
    blobs = dict(sql(path, "select trajectory, said from messages"))
    evicted, forgotten = [f"t{n:03d}" for n in range(150, 200)], [f"t{n:03d}" for n in range(0, 150, 2)]
    # All begin alike: with the names of the message's fields.
    others = b"".join(blob for id, blob in blobs.items() if id not in evicted and id not in forgotten)
    secrets = [piece for id in evicted + forgotten for piece in pieces(blobs[id]) if piece not in others]
    assert len(secrets) > 5000
    with closing(ReplayStore.open(path)) as store:
        store.prune(RUN, rows=schema.trajectories.c.slot >= 150, dry_run=False)
    where = f"id in ({', '.join(map(repr, forgotten))})"
    assert ask("forget", str(path), "--where", where, "--yes").exit_code == 1  # others have its task
    assert [file.name for file in tmp_path.iterdir() if any(piece in file.read_bytes() for piece in secrets)] == []
    left = [id for id in blobs if id not in evicted and id not in forgotten]
    with closing(ReplayStore.open(path)) as store:
        assert len(store.read(left)) == len(left) == 75


def test_forget_works_on_a_server_and_its_tasks_are_known_again_when_they_come_again(location: Location) -> None:
    secretive(location).close()
    answer = json.loads(ask("forget", location, "--where", "task == 't1'", "--yes", "--json").output)
    expected = {"trajectories": 1, "tasks": 1, "derived": 0, "updates": 0, "held_out": 0, "sessions": 0}
    assert answer == expected | {"shared_tasks": [], "copies": [], "done": True}
    gone = ("messages where trajectory = 'a'", "segments where trajectory = 'a'", "tasks where payload like '%va%'")
    for left in gone:
        assert sql(location, f"select count(*) from {left}") == [(0,)]
    with closing(ReplayStore.open(location)) as store:
        again = TaskRecord("t1", "lookup_chain", {"phrase": "new"})
        store.append([again], [group("g3", task="t1")], [trajectory("d", group="g3", task="t1", slot=5)])
    assert sql(location, "select payload from tasks where hash = 't1'") == [('{"phrase":"new"}',)]
    # The task of a row that stays is not forgotten.
    forgotten = "select hash from tasks where payload like '%removed%'"
    output = ask("forget", location, "--where", "id == 'b'", "--yes").output
    assert sql(location, forgotten) == []
    on_server = ", a server's backups and archived write-ahead logs" if not isinstance(location, Path) else ""
    assert output.endswith(f" and copies elsewhere (exports, reports{on_server}) are not touched\n")
    ask("forget", location, "--where", "id == 'c'", "--yes")
    assert sql(location, forgotten) == [("t2",)]


def test_forget_takes_what_was_made_from_a_row_and_names_what_it_leaves(location: Location) -> None:
    said = (Message("user", SECRET), Message("assistant", "x", author="llm"))
    made: dict[str, dict[str, Any]] = {
        "source": {},
        "later": {"source": "hindsight", "parent": "source", "member": 1},
        "evicted": {"source": "hindsight", "parent": "later", "member": 2},
        "last": {"source": "hindsight", "parent": "evicted", "group": "g2", "task": "solved"},
        "other": {"group": "g3", "task": "task-1"},
    }
    rows = [
        trajectory(id, segments=(Segment(tokens([5, 6, slot], [USER, LLM, LLM])),), messages=said, slot=slot, **of)
        for slot, (id, of) in enumerate(made.items())
    ]
    copied = trajectory("copied", segments=rows[0].segments, group="g4", task="task-2", iteration=2)
    with closing(new_store(location)) as store:
        put(store, *rows, copied)
        store.prune(rows=schema.trajectories.c.id == "evicted", dry_run=False)
    forget = ("forget", location, "--where", "id == 'source'")
    left = {"shared_tasks": ["task-1"], "copies": ["copied"]}
    for yes in ([], ["--yes"]):
        result = ask(*forget, "--json", *yes)
        answer = json.loads(result.output)
        assert (answer["trajectories"], answer["derived"], answer["tasks"]) == (3, 2, 1)
        assert (answer | left, result.exit_code) == (answer, len(yes))
    assert sql(location, "select id from trajectories order by id") == [("copied",), ("other",)]
    result = ask("forget", location, "--where", "id == 'copied'", "--yes")
    assert (result.exit_code, "left" in result.output) == (0, False)


def test_forget_of_what_was_made_from_a_row_names_the_row(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    with closing(new_store(path)) as store:
        put(store, trajectory("source"), trajectory("made", parent="source", source="hindsight", group="g2", task="t2"))
    result = ask("forget", path, "--where", "id == 'made'", "--yes")
    assert result.exit_code == 1
    assert result.output.splitlines()[1] == "left: 1 trajectories with the same content: source"


def test_forget_waits_for_nobody_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "replay.sqlite"
    secretive(path).close()
    monkeypatch.setattr("replay.storage.databases.sqlite._BUSY_MILLISECONDS", 50)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("begin")
        reader.execute("select count(*) from trajectories").fetchone()
        result = ask("forget", str(path), "--where", "id == 'a'", "--yes")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "database must be free and have room to be rewritten, got 'readers of its log' at" in result.stderr
    assert "Stop the program that has been using it all this time." in result.stderr
    assert sql(path, "select count(*) from segments where trajectory = 'a'") == [(0,)]


QUARANTINED = "select count(*) from trajectories where state = 'quarantined'"


def spoiled(location: Location, rows: int) -> Location:
    """100 rows, the first of them without their tokens."""
    store = new_store(location)
    Fresh(1, rates=(0.5,) * 10, size=10).append_to(store)
    sql(store, "delete from segments where trajectory in (select id from trajectories where slot < ?)", rows)
    store.close()
    return location


@pytest.mark.parametrize(("rows", "words", "code"), [(0, [], 0), (1, [], 0), (2, [], 1), (2, ["--limit", "0.02"], 0)])
def test_verify_fails_over_the_limit(tmp_path: Path, rows: int, words: list[str], code: int) -> None:
    result = ask("verify", spoiled(tmp_path / "replay.sqlite", rows), *words)
    assert result.exit_code == code
    assert f"read          100, of which {rows} corrupt" in result.output


def test_verify_quarantines_with_yes_only(location: Location) -> None:
    spoiled(location, 2)
    assert "nothing was changed; add --yes to quarantine them" in ask("verify", location).output
    assert sql(location, QUARANTINED) == [(0,)]
    answer = json.loads(ask("verify", location, "--yes", "--json").output)
    assert (len(answer["corrupt"]), answer["corrupt_share"], answer["failed"]) == (2, 0.02, True)
    assert set(answer["corrupt"].values()) == {"other segments than were written"}
    assert sql(location, QUARANTINED) == [(2,)]
    # What was quarantined is known, and no longer counted against the limit.
    assert ask("verify", location).exit_code == 0
