"""What is stored is damaged: a row at a time, or the file as a whole."""

from __future__ import annotations

import random
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from context.messages import Message
from context.tokens.token_sequence import Segment
from replay import CorruptTrajectory, ReplayError, ReplayStore, questions
from replay.records import Trajectory
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from replay.storage.format.encoding import content_hash
from replay.storage.format.schema import metadata
from replay.storage.retention import Capacity
from tests.fakes.records import RUN, FreshRows, group, new_store, request, sql, task, tokens, trajectory
from tests.fakes.replay_command import listed
from tests.replay.storage.damaged_buffers import WAYS, Asked, alter, fill

PAGE = 4096


def flipped(blob: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(blob)
    bit = chance.randrange(8 * len(damaged))
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_flipped_bit_of_a_row_is_found(tmp_path: Path, count: int) -> None:
    """Every bit that flips in the tokens of a row is found, or changes nothing that is read."""
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        collected = FreshRows(1, rates=(0.5,) * (count // 4)).append_to(store)
        whole = {row.id: row for row in collected.trajectories}
        chance = random.Random(12)
        for id, blob in sql(store, "select trajectory, tokens from segments order by trajectory"):
            sql(store, "update segments set tokens = ? where trajectory = ?", flipped(blob, chance), id)
        drawn = store.draw(request(2, count), make_sampler("uniform", 0))
        harmless = {row.trajectory.id for row in drawn}
        for row in drawn:
            assert content_hash(row.trajectory.segments) == content_hash(whole[row.trajectory.id].segments)
        found = dict(sql(store, "select id, state_reason from trajectories where state = 'quarantined'"))
        assert found.keys() | harmless == whole.keys() and not found.keys() & harmless
        # What zstd's frames may hold that nobody reads: unused bits of their descriptor.
        assert len(harmless) <= count / 20
        assert all(found.values())
        assert questions.summary(store)["states"]["quarantined"]["trajectories"] == len(found)


def rows_of_all_sizes() -> list[Trajectory]:
    """Some within a page of the file, some over many."""
    chance = random.Random(5)
    rows = []
    for number in range(40):
        count = chance.choice([6, 60, 3000])
        authors = [chance.choice(["user", "llm"]) for _ in range(count)]
        segment = Segment(tokens([chance.randrange(30_000) for _ in range(count)], authors))
        said = Message("user", "".join(chance.choices("abcdefgh ", k=chance.choice([20, 9000]))))
        row = trajectory(f"t{number:02d}", slot=number, segments=(segment,))
        rows.append(replace(row, messages=(said,)))
    return rows


@dataclass(frozen=True)
class Stored:
    """A file with rows, another that is still being written, and what the rows are."""

    file: bytes
    unfinished: bytes
    log: bytes
    """The write-ahead log of the unfinished one, with half of its rows."""
    rows: dict[str, Trajectory]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    path = tmp_path_factory.mktemp("stored") / "replay.sqlite"
    rows = rows_of_all_sizes()
    with closing(new_store(path)) as store:
        store.append([task()], [group()], rows[:20])
        sql(path, "pragma wal_checkpoint(passive)")
        store.append([], [], rows[20:])
        unfinished, log = path.read_bytes(), path.with_name("replay.sqlite-wal").read_bytes()
        whole = {row.id: row for row in store.read([row.id for row in rows])}
    return Stored(path.read_bytes(), unfinished, log, whole)


def damaged(stored: Stored, chance: random.Random) -> tuple[bytes, bytes | None]:
    """A file and its log."""
    kind = chance.choice(["cut", "random", "zeros", "noise", "log gone", "log cut", "log noise"])
    file, log = bytearray(stored.file), bytearray(stored.log)
    if kind == "cut":
        return bytes(file[: chance.randrange(len(file))]), None
    if kind == "random":
        return chance.randbytes(chance.randrange(1, 100_000)), None
    if kind in ("zeros", "noise"):
        for _ in range(chance.choice([1, 1, 3, 20])):
            start = PAGE * chance.randrange(len(file) // PAGE)
            file[start : start + PAGE] = chance.randbytes(PAGE) if kind == "noise" else bytes(PAGE)
        return bytes(file), None
    if kind == "log gone":
        return stored.unfinished[: chance.choice([None, -PAGE])], None
    start = chance.randrange(len(log))
    log[start:] = b"" if kind == "log cut" else chance.randbytes(len(log) - start)
    return stored.unfinished, bytes(log)


def look_at(stored: Stored, file: bytes, log: bytes | None, folder: Path) -> Iterator[Trajectory]:
    """What can be had of a damaged file: row by row, in one draw, and by opening it for writing."""
    for way in ("read", "draw"):
        path = folder / "damaged.sqlite"
        for old in folder.glob("damaged.sqlite*"):
            old.unlink()
        path.write_bytes(file)
        if log is not None:
            path.with_name("damaged.sqlite-wal").write_bytes(log)
        with suppress(ReplayError), closing(ReplayStore.create(path)) as store:
            if way == "draw":
                yield from (row.trajectory for row in store.draw(request(2, 40), make_sampler("uniform", 0)))
                store.verify()
            for id in stored.rows if way == "read" else ():
                with suppress(ReplayError):
                    yield from store.read([id])


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_damaged_file_gives_what_was_written_or_an_error_by_name(stored: Stored, tmp_path: Path, count: int) -> None:
    """F13: no row that was not written, and no error without a name. Messages have no hash: they are left out."""
    found = 0
    for seed in range(count):
        file, log = damaged(stored, random.Random(seed))
        for row in look_at(stored, file, log, tmp_path):
            written = stored.rows[row.id]
            assert content_hash(row.segments) == written.record.content_hash, f"seed {seed}"
            assert replace(row.record, state="eligible") == written.record, f"seed {seed}"
            found += 1
    # Most of what was not damaged can still be read.
    assert found > 10 * count


ODD = 7.125
"""A reward whose bytes stand in the file where it is stored, and nowhere else."""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of four rows, one of them of that reward."""
    path = tmp_path_factory.mktemp("odd") / "replay.sqlite"
    with closing(new_store(path)) as store:
        rewards = (0.0, ODD, 1.0, 0.5)
        store.append([task()], [group()], [trajectory(f"t{at}", slot=at, reward=r) for at, r in enumerate(rewards)])
    return path.read_bytes()


def flipped_in(file: bytes, path: Path, *, table: bool) -> None:
    """One bit of the reward, in the page of the row or in that of the index."""
    stored = struct.pack(">d", ODD)
    places = [at for at in range(len(file)) if file.startswith(stored, at)]
    assert len(places) == 2
    for at in places:
        path.write_bytes(file[: at + 1] + bytes([file[at + 1] ^ 1]) + file[at + 2 :])
        (of_row,) = sql(path, "select reward <> ? from trajectories not indexed where slot = 1", ODD)
        if of_row[0] == table:
            return
    raise AssertionError("there must be one of each")


Act = Callable[[ReplayStore], object]
ACTS: dict[str, Act] = {
    "draw": lambda store: store.draw(request(2, 4), make_sampler("uniform", 0)),
    "verify": lambda store: store.quarantine(store.verify().corrupt),
    "evict": lambda store: store.evict(RUN, 2, policy_version=1, capacity=Capacity(rows=1)),
    "resume": lambda store: store.resume(RUN, 0),
}


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("act", ACTS)
def test_bit_in_the_file_damages_its_row_alone(odd: bytes, tmp_path: Path, act: str, table: bool) -> None:
    """An entry of an index can't be found by what the row holds now."""
    path = tmp_path / "replay.sqlite"
    flipped_in(odd, path, table=table)
    with closing(ReplayStore.open(path)) as store:
        if not table:
            (damage,) = store.verify().damage
            assert "trajectories_by_run" in damage
            ACTS[act](store)
            assert not store.verify().corrupt
            return
        ACTS[act](store)
        found = store.verify()
        assert not found.damage
        states = dict(sql(store, "select id, state from trajectories"))
        if act in ("draw", "verify"):
            assert states == {"t0": "eligible", "t1": "quarantined", "t2": "eligible", "t3": "eligible"}
        else:
            assert set(states.values()) - {"eligible"}


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("trajectories", "reward", "abc"),
        ("trajectories", "stop_reason", b"\xff"),
        ("segments", "num_tokens", "x"),
        ("segments", "tokens", "text"),
        ("messages", "said", 5),
        ("messages", "num_messages", 4),
    ],
)
def test_values_no_writer_would_store_quarantine_their_row_alone(
    tmp_path: Path, table: str, column: str, value: object
) -> None:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        store.append([task()], [group()], [trajectory("a"), trajectory("b", slot=1)])
        key = "id" if table == "trajectories" else "trajectory"
        sql(store, f"update {table} set {column} = ? where {key} = 'a'", value)
        assert list(store.verify().corrupt) == ["a"]
        assert next(row["id"] for row in listed(store, filter="id == 'b' and 'drawer' in text")) == "b"
        with pytest.raises(CorruptTrajectory, match="^trajectory a "):
            store.read(["b", "a"])
        assert store.read(["b"])[0].id == "b"


def test_change_that_takes_the_checksum_away_is_meant(location: Location) -> None:
    with closing(new_store(location)) as store:
        store.append([task()], [group()], [trajectory("a")])
        sql(store, "update trajectories set reward = 0.25, record_checksum = null where id = 'a'")
        assert store.read(["a"])[0].record.reward == 0.25


@pytest.mark.every_database
@given(reward=st.floats(-1e6, 1e6), entropy=st.none() | st.floats(0, 9), text=st.text(max_size=9))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_record_holds_its_checksum_holds(
    store: ReplayStore, reward: float, entropy: float | None, text: str
) -> None:
    """Also what databases write otherwise than Python: whole numbers as reals, a negative zero, a NUL."""
    id = f"{reward}/{entropy}/{text}"
    made = trajectory(id, slot=0, group=id, reward=reward, mean_entropy=entropy, stop_reason=text)
    whole = trajectory(f"{id}/whole", slot=1, group=id, reward=-0.0, advantage=3, stop_reason=text)
    store.append([task()], [group(id)], [made, whole])
    assert [row.id for row in store.read([id, f"{id}/whole"])] == [id, f"{id}/whole"]


@pytest.mark.slow
def test_altered_cell_is_refused_quarantined_or_changes_nothing_that_is_trained_on(tmp_path: Path) -> None:
    """Any cell of any table becomes anything: what is trained on stays what was written, and every error is a line."""
    whole, path = tmp_path / "whole.sqlite", tmp_path / "altered.sqlite"
    fill(whole)
    cells = [(column, way) for table in metadata.sorted_tables for column in table.columns for way in range(WAYS)]
    kinds: Counter[str] = Counter()
    shutil.copy(whole, path)
    with closing(Asked(path)) as asked:
        for number, (column, way) in enumerate(random.Random(17).sample(cells, 24)):
            for old in tmp_path.glob("altered.sqlite*"):
                old.unlink()
            shutil.copy(whole, path)
            alter(path, column, way, random.Random(number))
            found = asked.again(random.Random(number))
            assert not found.wrong, (column, way)
            kinds[found.kind] += 1
    assert kinds["quarantined"] and kinds["told"] and not kinds["raw"] + kinds["different"]
