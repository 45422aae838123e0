"""A disk that fails a write or a flush in the middle of a transaction: soak. What is left at a kill there, a power cut
shows (tests/soak)."""

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
PROGRAM = """
import sys
from pathlib import Path
from replay import ReplayError, ReplayStore
from tests.fakes.records import trajectory

store = ReplayStore.open(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    try:
        store.append([], [], [trajectory(f"{number:05d}")])
        print(f"stored {number:05d}", flush=True)
    except ReplayError as error:
        print(f"refused {number:05d} {error}", flush=True)
store.close()
"""


# The 10th call fails, and then some of those after it, or all.
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("pwrite64:error=ENOSPC:when=10+97", "database or disk is full"),
        ("pwrite64:error=EIO:when=10+97", "disk I/O error"),
        ("fdatasync:error=EIO:when=10+7", "disk I/O error"),
        ("fdatasync:error=EIO:when=10+", "disk I/O error"),
    ],
)
def test_error_of_the_disk_is_told_and_loses_nothing(tmp_path: Path, failure: str, message: str) -> None:
    path = tmp_path / "replay.sqlite"
    begin(path)
    call, flush = failure.partition(":")[0], failure.startswith("fdatasync")
    command = [str(STRACE), "-f", "-o", "/dev/null", "-P", str(path), "-P", f"{path}-wal"]
    command += ["-e", f"trace={call}", "-e", f"inject={failure}", sys.executable, "-c", PROGRAM, str(path), str(COUNT)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.split(" ", 2) for line in ended.stdout.splitlines()]
    assert (ended.returncode, len(lines)) == (0, COUNT)
    refused = [line[2] for line in lines if line[0] == "refused"]
    assert 2 <= len(refused) < COUNT
    unknown = "Whether the transaction was stored is not known; what was stored before is safe."
    assert all(f"got '{message}' at {path} (" in line and (unknown in line) == flush for line in refused)
    stored, there = {line[1] for line in lines if line[0] == "stored"}, stored_ids(path)
    assert stored <= set(there)
    # Whether the last one that was refused at a flush is there, only the disk knows.
    assert len(there) - len(stored) <= flush
    assert sql(path, "pragma integrity_check") == [("ok",)]
    with closing(ReplayStore.open(path)) as store:
        for number in range(COUNT):
            store.append([], [], [trajectory(f"{number:05d}")])
    check_whole(path, stored_ids(path))
    check_counts(path, COUNT, sent_again=True)
