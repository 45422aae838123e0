"""A disk that fails a write or a flush in the middle of a transaction, and a process that dies there: soak."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from replay import ReplayStore
from tests.fakes.records import sql, trajectory
from tests.replay.storage.writers import begin, check_counts, check_whole, stored_ids

STRACE = shutil.which("strace")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(STRACE is None, reason="system calls are made to fail by strace, which is not installed"),
]

COUNT = 30
Lines = list[list[str]]


def appended(path: Path, call: str, what: str) -> tuple[int, Lines]:
    """Rows appended while that system call does that on the file and its log: the exit code, what became of each."""
    begin(path)
    side = path.with_name(f"{path.name}-wal")
    command = [str(STRACE), "-f", "-o", "/dev/null", "-P", str(path), "-P", str(side)]
    command += ["-e", f"trace={call}", "-e", f"inject={call}:{what}"]
    program = [sys.executable, "-m", "tests.replay.storage.appending", str(path), str(COUNT)]
    ended = subprocess.run([*command, *program], capture_output=True, text=True, check=False)
    return ended.returncode, [line.split(" ", 2) for line in ended.stdout.splitlines()]


def check_nothing_lost(path: Path, lines: Lines) -> int:
    """Every row that was told to be stored is there, whole; sent again, each is there once. Answers how many more."""
    told = {id for word, id, *_ in lines if word == "stored"}
    there = stored_ids(path)
    assert told <= set(there)
    check_whole(path, there)
    assert sql(path, "pragma integrity_check") == [("ok",)]
    with closing(ReplayStore.open(path)) as store:
        for number in range(COUNT):
            store.append([], [], [trajectory(f"{number:05d}")])
    check_whole(path, stored_ids(path))
    check_counts(path, COUNT, sent_again=True)
    return len(there) - len(told)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("pwrite64:error=ENOSPC:when=10+97", "database or disk is full"),
        ("pwrite64:error=EIO:when=10+97", "disk I/O error"),
    ],
)
def test_error_of_the_disk_is_told_and_loses_nothing(tmp_path: Path, failure: str, told: str) -> None:
    """F9 and F10: the 10th call fails, and then every 97th write."""
    path = tmp_path / "replay.sqlite"
    code, lines = appended(path, *failure.split(":", 1))
    assert code == 0
    assert len(lines) == COUNT
    refused = [line[2] for line in lines if line[0] == "refused"]
    assert 2 <= len(refused) < COUNT
    assert all(f"got '{told}' at {path} (" in line for line in refused)
    assert check_nothing_lost(path, lines) == 0


@pytest.mark.parametrize("which", ["10+7", "10+"])
def test_flush_that_fails_is_told_and_loses_nothing(tmp_path: Path, which: str) -> None:
    """F10: the 10th, and then every 7th or all."""
    path = tmp_path / "replay.sqlite"
    code, lines = appended(path, "fdatasync", f"error=EIO:when={which}")
    assert (code, len(lines)) == (0, COUNT)
    refused = [line[2] for line in lines if line[0] == "refused"]
    assert 2 <= len(refused) < COUNT
    assert all(f"got 'disk I/O error' at {path} (" in line for line in refused)
    assert all("Whether the transaction was stored is not known; what was stored before is safe." in r for r in refused)
    # Whether the last one that was refused is there, only the disk knows.
    assert check_nothing_lost(path, lines) <= 1


@pytest.mark.parametrize(("call", "last"), [("fdatasync", 25), ("pwrite64", 60)])
def test_kill_at_every_write_and_flush_of_the_file_loses_nothing(tmp_path: Path, call: str, last: int) -> None:
    """F2, below SQLite."""
    for number in range(1, last, 2 if call == "pwrite64" else 1):
        path = tmp_path / str(number) / "replay.sqlite"
        path.parent.mkdir()
        code, lines = appended(path, call, f"signal=KILL:when={number}")
        assert code != 0
        assert 0 <= check_nothing_lost(path, lines) <= 1
