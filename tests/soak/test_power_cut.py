"""Power cuts at random moments, on disks that keep of unflushed writes what they like."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from replay import ReplayStore
from replay.sampling.samplers import make_sampler
from tests.fakes.records import RUN, iterate, policy, run_record, sql, trajectory
from tests.replay.storage.writers import begin, check_whole, stored_ids
from tests.soak.power_cut_writers import EACH, ITERATIONS, ROUNDS, WRITERS
from tests.soak.recorded_disk import STRACE, Recording, images, record

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(STRACE is None, reason="writes are recorded by strace, which is not installed"),
]

IMAGES = 200
"""Of each of appending and learning."""
NAME = "replay.sqlite"


def recorded(folder: Path, work: str) -> Recording:
    return record(folder, [sys.executable, "-m", "tests.soak.power_cut_writers", work, str(folder / NAME)])


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def check_sound(path: Path) -> None:
    assert sql(path, "pragma integrity_check") == [("ok",)]
    assert sql(path, "pragma foreign_key_check") == []
    with closing(ReplayStore.open(path, read_only=True)) as store:
        assert store.verify().corrupt == {}


def test_power_cut_loses_no_row_that_was_stored(disk: Path, tmp_path: Path) -> None:
    recording = recorded(disk, "append")
    assert len(recording.said) == 1 + WRITERS * ROUNDS * EACH

    def check(path: Path, told: list[str]) -> None:
        if "begun" not in told:
            begin(path)
        stored = {line.removeprefix("stored ") for line in told if line.startswith("stored ")}
        there = stored_ids(path)
        assert stored <= set(there)
        assert len(there) - len(stored) <= WRITERS
        check_whole(path, there)
        check_sound(path)
        with closing(ReplayStore.open(path)) as store:
            store.append([], [], [trajectory("afterwards")])
        assert set(stored_ids(path)) == {*there, "afterwards"}

    print(len(recording.stretches), "flushes", images(recording, tmp_path, IMAGES, check, name=NAME))


def updates(path: Path, last: int) -> list[list[tuple[Any, ...]]]:
    """Everything about them that does not tell the time."""
    draws = (
        "select iteration, slot, trajectory, state, staleness, drift_mean from draws where iteration <= ? order by 1, 2"
    )
    metrics = "select * from metrics where iteration <= ? order by run, iteration, name"
    rows = "select id, record_checksum from trajectories where iteration <= ? order by id"
    return [sql(path, query, last) for query in (draws, metrics, rows)]


def test_power_cut_loses_no_update_that_was_committed(disk: Path, tmp_path: Path) -> None:
    recording = recorded(disk, "learn")
    assert len(recording.said) == 1 + ITERATIONS

    def check(path: Path, told: list[str]) -> None:
        committed = max(0, len(told) - 1)
        with closing(ReplayStore.create(path)) as store:
            if not told:
                store.add_run(run_record())
                store.add_policy(policy(0))
            there = sql(path, "select coalesce(max(iteration), 0) from iterations")[0][0]
            assert there in (committed, committed + 1)
            assert updates(path, there) == updates(disk / NAME, there)
            # Of the next iteration: all rows of its one append, or none.
            assert sql(path, "select count(*) from trajectories") in ([(8 * there,)], [(8 * there + 8,)])
            check_whole(path, stored_ids(path))
            check_sound(path)
            store.resume(RUN, there)
            iterate(store, there + 1, make_sampler("uniform", 0), attempt=1)

    print(len(recording.stretches), "flushes", images(recording, tmp_path, IMAGES, check, name=NAME))
