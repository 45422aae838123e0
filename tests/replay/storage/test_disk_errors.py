"""A disk that fails a flush in the middle of a transaction. What is left at a kill there, a power cut shows."""

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
    pytest.mark.slow,
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
"""


@pytest.mark.parametrize("failing", ["10+7", "10+"])
def test_flush_that_fails_leaves_one_append_unknown_and_loses_nothing(tmp_path: Path, failing: str) -> None:
    """The 10th fails, and then some of those after it, or all."""
    path = tmp_path / "replay.sqlite"
    begin(path)
    command = [str(STRACE), "-f", "-o", "/dev/null", "-P", str(path), "-P", f"{path}-wal", "-e", "trace=fdatasync"]
    command += [
        "-e",
        f"inject=fdatasync:error=EIO:when={failing}",
        sys.executable,
        "-c",
        PROGRAM,
        str(path),
        str(COUNT),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split(" ", 2) for line in ended.stdout.splitlines()]
    refused = [line[2] for line in lines if line[0] == "refused"]
    assert len(lines) == COUNT and 2 <= len(refused) < COUNT
    unknown = "Whether the transaction was stored is not known; what was stored before is safe."
    assert all(f"got 'disk I/O error' at {path} (" in line and unknown in line for line in refused)
    stored, there = {line[1] for line in lines if line[0] == "stored"}, stored_ids(path)
    # Whether the last one that was refused is there, only the disk knows.
    assert stored <= set(there) and len(there) - len(stored) <= 1
    assert sql(path, "pragma integrity_check") == [("ok",)]
    with closing(ReplayStore.open(path)) as store:
        for number in range(COUNT):
            store.append([], [], [trajectory(f"{number:05d}")])
    check_whole(path, stored_ids(path))
    check_counts(path, COUNT, sent_again=True)
