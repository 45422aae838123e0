"""What is stored is damaged: a row at a time, or the file as a whole."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay import CorruptTrajectory, ReplayStore, questions
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from replay.storage.format.encoding import content_hash
from replay.storage.format.schema import metadata
from replay.storage.retention import Capacity
from tests.fakes.records import RUN, FreshRows, group, new_store, request, sql, task, trajectory
from tests.fakes.replay_command import listed
from tests.replay.storage.damaged_buffers import WAYS, Asked, alter, buffer_with_log, place

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


Placed = tuple[bytes, bytes | None]
"""A file and its log."""


def altered_cell(whole: Placed, path: Path, chance: random.Random) -> Placed:
    """One cell of a table becomes anything."""
    path.write_bytes(whole[0])
    tables = metadata.sorted_tables
    alter(path, chance.choice(list(chance.choice(tables).columns)), chance.randrange(WAYS), chance)
    return path.read_bytes(), None


def damaged_file(whole: Placed, path: Path, chance: random.Random) -> Placed:
    """It is cut, or pages of it are zeros or noise, or its log is not what was written."""
    kind = chance.choice(["cut", "random", "zeros", "noise", "log gone", "log cut", "log noise"])
    file, log = bytearray(whole[0]), bytearray(whole[1] or b"")
    if kind == "cut":
        return bytes(file[: chance.randrange(len(file))]), None
    if kind == "random":
        return chance.randbytes(chance.randrange(1, 100_000)), None
    for _ in range(chance.choice([1, 1, 3, 20]) if kind in ("zeros", "noise") else 0):
        start = PAGE * chance.randrange(len(file) // PAGE)
        file[start : start + PAGE] = chance.randbytes(PAGE) if kind == "noise" else bytes(PAGE)
    start = chance.randrange(len(log))
    log[start:] = chance.randbytes(len(log) - start) if kind == "log noise" else b""
    return bytes(file), bytes(log) if kind.startswith("log ") and kind != "log gone" else None


@pytest.mark.slow
@pytest.mark.parametrize("damage", [altered_cell, damaged_file])
@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.soak)])
def test_damaged_buffer_gives_what_was_written_or_an_error_of_one_line(
    tmp_path: Path, damage: Callable[[Placed, Path, random.Random], Placed], count: int
) -> None:
    path = tmp_path / "damaged.sqlite"
    whole = buffer_with_log(tmp_path)
    kinds: Counter[str] = Counter()
    place(path, *whole)
    with closing(Asked(path)) as asked:
        for seed in range(count):
            place(path, *damage(whole, path.with_name("altered.sqlite"), random.Random(seed)))
            found = asked.again(random.Random(seed))
            assert not found.wrong, seed
            kinds[found.kind] += 1
    assert kinds["quarantined"] + kinds["refused"] + kinds["told"] > count / 3
