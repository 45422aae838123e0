"""What is stored is damaged: a row at a time, or the file as a whole."""

from __future__ import annotations

import random
import struct
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay import ReplayStore
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from tests.fakes.records import group, new_store, request, sql, task, trajectory
from tests.replay.storage.damaged_buffers import Asked, buffer_with_log, place

PAGE = 4096


def test_row_whose_bit_flips_in_the_file_is_quarantined_alone(tmp_path: Path) -> None:
    """Its entries in indexes can't be found by what it holds now."""
    path, stored = tmp_path / "replay.sqlite", struct.pack(">d", 7.125)
    with closing(new_store(path)) as store:
        rows = [trajectory(f"t{at}", slot=at, reward=7.125 if at == 1 else 0.0) for at in range(4)]
        store.append([task()], [group()], rows)
    whole = path.read_bytes()
    # It stands in the page of the row, and in that of an index.
    for at in (at for at in range(len(whole)) if whole.startswith(stored, at)):
        path.write_bytes(whole[: at + 1] + bytes([whole[at + 1] ^ 1]) + whole[at + 2 :])
        if sql(path, "select 1 from trajectories not indexed where slot = 1 and reward <> 7.125"):
            break
    with closing(ReplayStore.open(path)) as store:
        drawn = store.draw(request(2, 4), make_sampler("uniform", 0))
        assert sorted(row.trajectory.id for row in drawn) == ["t0", "t2", "t3"]
        assert sql(path, "select id from trajectories where state = 'quarantined'") == [("t1",)]
        assert not store.verify().damage


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


def damaged(file: bytes, log: bytes, chance: random.Random) -> tuple[bytes, bytes | None]:
    """A file and its log, cut, or with pages of zeros or noise, or with a log that is not what was written."""
    kind = chance.choice(["cut", "random", "zeros", "noise", "log gone", "log cut", "log noise"])
    pages = bytearray(file)
    if kind == "cut":
        return file[: chance.randrange(len(file))], None
    if kind == "random":
        return chance.randbytes(chance.randrange(1, 100_000)), None
    for _ in range(chance.choice([1, 1, 3, 20]) if kind in ("zeros", "noise") else 0):
        start = PAGE * chance.randrange(len(file) // PAGE)
        pages[start : start + PAGE] = chance.randbytes(PAGE) if kind == "noise" else bytes(PAGE)
    if kind not in ("log cut", "log noise"):
        return bytes(pages), None
    start = chance.randrange(len(log))
    return file, log[:start] + (chance.randbytes(len(log) - start) if kind == "log noise" else b"")


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.soak)])
def test_damaged_buffer_gives_what_was_written_or_an_error_of_one_line(tmp_path: Path, count: int) -> None:
    path = tmp_path / "damaged.sqlite"
    file, log = buffer_with_log(tmp_path)
    kinds: Counter[str] = Counter()
    place(path, file, log)
    with closing(Asked(path)) as asked:
        for seed in range(count):
            place(path, *damaged(file, log, random.Random(seed)))
            kind, wrong = asked.again(random.Random(seed))
            assert not wrong, seed
            kinds[kind] += 1
    assert kinds["quarantined"] + kinds["refused"] + kinds["found"] > count / 3
