"""What the machine does to a buffer in a file: no room, no right, no local disk, and flushes that fail."""

import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa

from context.messages import Message
from replay import DatabaseRefused, ReplayError, ReplayStore
from replay.errors import DatabaseFailed
from replay.storage.databases import disk
from replay.storage.format.schema import trajectories
from tests.fakes.records import Fresh, new_store, put, sql, trajectory
from tests.replay.storage.writers import begin, check_counts, check_whole, stored_ids

pytestmark = pytest.mark.slow

Answer = TypeVar("Answer")


def in_child(work: Callable[..., Answer], *arguments: object) -> Answer:
    """In a process of its own, which may give up what the tests need."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(work, *arguments).result()


def with_two_rows(path: Path) -> Path:
    with closing(new_store(path, "run-2")) as store:
        put(store, *(trajectory(id, run="run-2") for id in ("a", "b")))
    return path


def test_full_disk_is_told_with_its_path_its_room_and_the_remedy(tmp_path: Path) -> None:
    path = with_two_rows(tmp_path / "full.sqlite")

    def small_file(connection: Any, record: object) -> None:
        """SQLite answers this limit as it answers a full disk."""
        connection.execute(f"pragma max_page_count={connection.execute('pragma page_count').fetchone()[0]}")

    sa.event.listen(sa.Pool, "connect", small_file)
    try:
        # 48 rows, more than there is room for in pages begun.
        with closing(ReplayStore.open(path)) as store, pytest.raises(DatabaseFailed) as error:
            Fresh(2, rates=(0.5,) * 12, run="run-2").append_to(store)
    finally:
        sa.event.remove(sa.Pool, "connect", small_file)
    said = str(error.value)
    assert "\n" not in said and f"got 'database or disk is full' at {path} (" in said
    assert " bytes free). Nothing of the transaction was stored; what was stored before is safe. Make room" in said
    # What was acknowledged is there, and nothing else; and it can be written again.
    with closing(ReplayStore.open(path)) as store:
        assert [row.id for row in store.read(["a", "b"])] == ["a", "b"]
        assert sql(path, "select count(*) from trajectories") == [(2,)]
        assert sql(path, "pragma integrity_check") == [("ok",)]
        assert store.append([], [], [trajectory("c", run="run-2")]).inserted == 1


def said_of_forgetting(path: Path, limit: int) -> str:
    """What is said where no file may grow beyond so many bytes: to SQLite, an error of the disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with closing(ReplayStore.open(path)) as store, pytest.raises(ReplayError) as error:
        store.forget(trajectories.c.id == "a", dry_run=False)
    return str(error.value)


def test_forget_without_room_for_a_new_file_says_what_is_done(tmp_path: Path) -> None:
    """The file of 2 MB can't be written again within 1 MB. Nothing makes random text smaller than half."""
    path = with_two_rows(tmp_path / "replay.sqlite")
    long = (Message("user", random.Random(0).randbytes(2_000_000).hex()),)
    with closing(ReplayStore.open(path)) as store:
        store.append([], [], [replace(trajectory("c", run="run-2"), messages=long)])
    said = in_child(said_of_forgetting, path, 1_000_000)
    assert "database must be free and have room to be rewritten, got 'disk I/O error' at" in said
    assert sql(path, "select count(*) from segments where trajectory = 'a'") == [(0,)]
    with closing(ReplayStore.open(path)) as store:
        store.forget(trajectories.c.id == "a", dry_run=False)


def opened_by_nobody(path: Path) -> list[str]:
    """What is answered to a look and to a change by somebody who is not root, who may read and write everywhere."""
    if os.geteuid() == 0:
        os.setuid(65534)
    answers = []
    for read_only in (True, False):
        try:
            with closing(ReplayStore.open(path, read_only=read_only)) as store:
                answers.append(f"{len(store.read(['a', 'b']))} rows")
        except DatabaseRefused as error:
            answers.append(str(error))
    return answers


@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "look", "change"),
    [
        (0o600, 0, "database must be .* got nothing at", "database must be .* got nothing at"),
        (0, 0o777, *["database must be .*, got 'unable to open database file' at"] * 2),
        (0o444, 0o555, "database must be .* copy it", "database must be "),
    ],
)
def test_file_that_one_may_not_read_or_write_is_refused_in_one_line_and_left_as_it_is(
    tmp_path: Path, file_mode: int, folder_mode: int, look: str, change: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    path = with_two_rows(place / "replay.sqlite")
    before = path.read_bytes()
    for each in (tmp_path, *tmp_path.parents) if os.geteuid() == 0 else ():
        each.chmod(each.stat().st_mode | 0o755)
    path.chmod(file_mode)
    place.chmod(folder_mode)
    answers = in_child(opened_by_nobody, path)
    place.chmod(0o700)
    path.chmod(0o600)
    assert all(re.match(rule, said) and "\n" not in said for rule, said in zip((look, change), answers, strict=True))
    assert path.read_bytes() == before
    # The look at a file that one may write leaves its two empty side files.
    assert not any(side.stat().st_size for side in place.glob("*-wal"))


def mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """The list of mounts of a machine where tmp_path stands on such a file system."""
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:4711 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n"
        f"97 22 {os.major(device)}:{os.minor(device)} / /mnt/home\\040of rw,relatime shared:50 master:3 - {kind} "
        "server:/home rw,vers=4.2\n"
    )
    monkeypatch.setattr(disk, "_MOUNTS", mounts)


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
def test_network_file_system_is_refused_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = with_two_rows(tmp_path / "replay.sqlite")
    mounted(monkeypatch, tmp_path, kind)
    rule = f"^database must be on a local disk to be written to, got {kind} at .*sqlite. .*PostgreSQL server"
    for attempt in (ReplayStore.create, ReplayStore.open, lambda _: ReplayStore.create(tmp_path / "new.sqlite")):
        with pytest.raises(DatabaseRefused, match=rule):
            attempt(path)
    assert not (tmp_path / "new.sqlite").exists()
    with closing(ReplayStore.open(path, read_only=True)) as reader:
        assert len(reader.read(["a", "b"])) == 2


STRACE = shutil.which("strace")

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


@pytest.mark.skipif(STRACE is None, reason="system calls are made to fail by strace, which is not installed")
@pytest.mark.parametrize("failing", ["10+7", "10+"])
def test_flush_that_fails_leaves_one_append_unknown_and_loses_nothing(tmp_path: Path, failing: str) -> None:
    """The 10th fails, and then some of those after it, or all. What is left at a kill there, a power cut shows."""
    path = tmp_path / "replay.sqlite"
    begin(path)
    command = [str(STRACE), "-f", "-o", "/dev/null", "-P", str(path), "-P", f"{path}-wal", "-e", "trace=fdatasync"]
    program = [sys.executable, "-c", PROGRAM, str(path), str(COUNT)]
    command += ["-e", f"inject=fdatasync:error=EIO:when={failing}", *program]
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
