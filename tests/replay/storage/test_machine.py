"""What the machine does to a buffer in a file: no room, no right, no memory, no local disk."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from agentloop.cli.replay import app
from context.messages import Message
from replay import DatabaseRefused, ReplayError, ReplayStore
from replay.sampling.samplers import make_sampler
from replay.storage.databases import disk
from tests.fakes.records import group, iterate, new_store, sql, task, trajectory

Answer = TypeVar("Answer")


def in_child(work: Callable[..., Answer], *arguments: object) -> Answer:
    """In a process of its own, which may give up what the tests need."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(work, *arguments).result()


def one_line(words: list[str]) -> str:
    """What the command says, which must be why it failed."""
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert isinstance(result.exception, SystemExit), (words, result.exception)
    assert (result.exit_code, result.stderr.count("\n"), result.stdout) == (2, 1, ""), (words, result.output)
    return result.stderr


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A file of experience: 48 rows, more than there is room for in pages begun."""
    with closing(new_store(tmp_path / "source.sqlite")) as store:
        for iteration in range(1, 7):
            iterate(store, iteration, make_sampler("uniform", 0))
    assert CliRunner().invoke(app, ["export", str(store.path), str(tmp_path / "rows.jsonl")]).exit_code == 0
    return tmp_path / "rows.jsonl"


def with_two_rows(path: Path) -> Path:
    with closing(new_store(path, "run-2")) as store:
        store.append([task()], [group(run="run-2")], [trajectory(id, run="run-2") for id in ("a", "b")])
    return path


def check_untouched(path: Path) -> None:
    """What was acknowledged is there, and nothing else; and it can be written again."""
    with closing(ReplayStore.open(path)) as store:
        assert [row.id for row in store.read(["a", "b"])] == ["a", "b"]
        assert sql(path, "select count(*) from trajectories") == [(2,)]
        assert sql(path, "pragma integrity_check") == [("ok",)]
        assert store.append([], [], [trajectory("c", run="run-2")]).inserted == 1


@contextmanager
def no_room() -> Iterator[None]:
    """SQLite answers this limit as it answers a full disk."""

    def limit(connection: object, record: object) -> None:
        pages = connection.execute("pragma page_count").fetchone()[0]  # type: ignore[attr-defined]
        connection.execute(f"pragma max_page_count={pages}")  # type: ignore[attr-defined]

    sa.event.listen(sa.Pool, "connect", limit)
    try:
        yield
    finally:
        sa.event.remove(sa.Pool, "connect", limit)


def test_full_disk_is_told_with_its_path_its_room_and_the_remedy(exported: Path, tmp_path: Path) -> None:
    path = with_two_rows(tmp_path / "full.sqlite")
    with no_room():
        told = one_line(["import", str(exported), str(path)])
    assert f"got 'database or disk is full' at {path} (" in told
    assert " bytes free). Nothing of the transaction was stored; what was stored before is safe. Make room" in told
    check_untouched(path)


def import_within(limit: int, file: Path, path: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return one_line(["import", str(file), str(path)])


def test_write_that_fails_is_told_and_loses_nothing(exported: Path, tmp_path: Path) -> None:
    """The system refuses to let the log grow: to SQLite, an error of the disk."""
    path = with_two_rows(tmp_path / "limited.sqlite")
    told = in_child(import_within, 40_000, exported, path)
    assert f"got 'disk I/O error' at {path} (" in told
    assert "Look for a failing disk, or a limit on the size of files (ulimit -f)." in told
    check_untouched(path)


def forget_within(limit: int, path: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return one_line(["forget", str(path), "--where", "id == 'a'", "--yes"])


def test_forget_without_room_for_a_new_file_says_what_is_done(tmp_path: Path) -> None:
    """The file of 2 MB can't be written again within 1 MB. Nothing makes random text smaller than half."""
    path = with_two_rows(tmp_path / "replay.sqlite")
    with closing(ReplayStore.open(path)) as store:
        long = (Message("user", random.Random(0).randbytes(2_000_000).hex()),)
        store.append([], [], [replace(trajectory("c", run="run-2"), messages=long)])
    told = in_child(forget_within, 1_000_000, path)
    assert "database must be free and have room to be written anew, got 'disk I/O error' at" in told
    assert "What was deleted is gone for every reader; its bytes go when this is run again." in told
    assert sql(path, "select count(*) from segments where trajectory = 'a'") == [(0,)]
    assert sql(path, "pragma integrity_check") == [("ok",)]
    again = CliRunner().invoke(app, ["forget", str(path), "--where", "id == 'a'", "--yes"])
    assert again.exit_code == 0


LOOKS = (
    ["stats"],
    ["ls"],
    ["show", "a"],
    ["tasks"],
    ["lineage", "1"],
    ["export", "{run}", "{rows}.copy"],
    ["prune", "--age", "3"],
)
CHANGES = (
    ["import", "{rows}"],
    ["prune", "--age", "3", "--yes"],
    ["forget", "--where", "success", "--yes"],
)
COMMANDS = (*LOOKS, *CHANGES)


def as_nobody() -> None:
    """Root may read and write everywhere."""
    if os.geteuid() == 0:
        os.setuid(65534)


def filled(words: list[str], place: Path, rows: Path) -> list[str]:
    given = [word.format(run=place, rows=rows) for word in words]
    return given if "{run}" in words else [*given, str(place)]


def told_by_every_command(places: list[Path], rows: Path) -> list[str]:
    as_nobody()
    return [one_line(filled(words, place, rows)) for place in places for words in COMMANDS]


def open_to_everybody(folder: Path) -> None:
    for each in (folder, *folder.parents) if os.geteuid() == 0 else ():
        mode = each.stat().st_mode
        if mode & 0o005 != 0o005:
            each.chmod(mode | 0o755)


@pytest.fixture
def closed_places(tmp_path: Path) -> Iterator[list[Path]]:
    """A folder that is closed, a file nobody may read, a folder in its place, and nothing."""
    for name, file_mode, folder_mode in (("closed", 0o600, 0), ("secret", 0, 0o777)):
        new_folder = tmp_path / name
        new_folder.mkdir()
        with_two_rows(new_folder / "replay.sqlite").chmod(file_mode)
        new_folder.chmod(folder_mode)
    (tmp_path / "taken" / "replay.sqlite").mkdir(parents=True)
    open_to_everybody(tmp_path)
    yield [tmp_path / name for name in ("closed", "secret", "taken", "missing", "missing/replay.sqlite")]
    (tmp_path / "closed").chmod(0o700)


def test_every_command_tells_in_one_line_what_it_may_not_open(closed_places: list[Path], exported: Path) -> None:
    exported.chmod(0o644)
    lines = in_child(told_by_every_command, closed_places, exported)
    assert len(lines) == len(closed_places) * len(COMMANDS)
    assert all(line.startswith("agentloop: database must be ") for line in lines)
    by_place = lines[:: len(COMMANDS)]
    assert "got nothing at" in by_place[0]
    assert "got 'unable to open database file' at" in by_place[1]
    assert "got a folder at" in by_place[2]
    assert "got nothing at" in by_place[3]


def fix(folder: Path, *, open_log: bool = False) -> Path:
    """A folder that only root can write, with a buffer that is closed, or one whose trainer was killed."""
    folder.mkdir()
    path = with_two_rows(folder / "replay.sqlite")
    if open_log:
        with closing(ReplayStore.open(path)) as store:
            store.append([], [], [trajectory("c", run="run-2")])
            log = path.with_name("replay.sqlite-wal").read_bytes()
        path.with_name("replay.sqlite-wal").write_bytes(log)
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    open_to_everybody(folder)
    return path


def looked_at(place: Path, rows: Path) -> tuple[list[str], list[str]]:
    """What commands that look complain of, and those that change."""
    as_nobody()
    looks = [CliRunner().invoke(app, filled(words, place, rows)).stderr for words in LOOKS]
    with closing(ReplayStore.open(place / "replay.sqlite", read_only=True)) as store:
        assert [row.id for row in store.read(["a", "b"])] == ["a", "b"]
    return looks, [one_line(filled(words, place, rows)) for words in CHANGES]


def test_closed_buffer_in_a_folder_one_can_not_write_is_looked_at(tmp_path: Path, exported: Path) -> None:
    path = fix(tmp_path / "fixed")
    before = path.read_bytes()
    exported.chmod(0o644)
    tmp_path.chmod(0o777)
    looks, refused = in_child(looked_at, path.parent, exported)
    assert not any("database must" in told for told in looks) and looks[:4] == [""] * 4
    assert all(line.startswith("agentloop: database must be ") for line in refused)
    assert [file.name for file in path.parent.iterdir()] == ["replay.sqlite"] and path.read_bytes() == before


def told_of_a_change(path: Path, change: bytes) -> str:
    """What somebody who looks is told when somebody else may write there."""
    descriptor = os.open(path, os.O_RDWR)
    as_nobody()
    with closing(ReplayStore.open(path, read_only=True)) as store:
        assert [row.id for row in store.read(["a"])] == ["a"]
        os.pwrite(descriptor, change, 0)
        with pytest.raises(ReplayError) as error:
            store.read(["a"])
    return str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write what others can not")
def test_change_of_a_buffer_in_a_folder_one_can_not_write_is_told(tmp_path: Path) -> None:
    path = fix(tmp_path / "fixed")
    told = in_child(told_of_a_change, path, path.read_bytes()[:4096])
    assert told.startswith("database must stay as it is while it is looked at in a folder without a right to write")
    assert told.endswith(f"got one that was changed at {path}. Open it anew.")


def mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """The list of mounts of a machine where tmp_path stands on such a file system."""
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:4711 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n"
        f"97 22 {number} / /mnt/home\\040of rw,relatime shared:50 master:3 - {kind} server:/home rw,vers=4.2\n"
    )
    monkeypatch.setattr(disk, "_MOUNTS", mounts)


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
def test_network_file_system_is_refused_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = with_two_rows(tmp_path / "replay.sqlite")
    mounted(monkeypatch, tmp_path, kind)
    rule = f"^database must be on a local disk to be written to, got {kind} at .*sqlite. .*PostgreSQL server"
    for attempt in (ReplayStore.create, ReplayStore.open):
        with pytest.raises(DatabaseRefused, match=rule):
            attempt(path)
    with pytest.raises(DatabaseRefused, match=rule):
        ReplayStore.create(tmp_path / "new.sqlite")
    assert not (tmp_path / "new.sqlite").exists()
    with closing(ReplayStore.open(path, read_only=True)) as reader:
        assert len(reader.read(["a", "b"])) == 2


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def opened_and_closed(path: Path, times: int) -> list[int]:
    counts = []
    for number in range(times):
        with closing(ReplayStore.open(path, read_only=number % 2 == 0)) as store:
            store.run()
        counts.append(open_files())
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted where Linux lists them")
def test_closing_gives_every_file_back(tmp_path: Path) -> None:
    counts = opened_and_closed(with_two_rows(tmp_path / "replay.sqlite"), 60)
    assert max(counts) == counts[0]


def told_without_files(path: Path) -> list[str]:
    """With a few files more than there are, all taken."""
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 32
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    told = []
    with closing(ReplayStore.open(path)) as store:
        taken: list[int] = []
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for attempt in (lambda: ReplayStore.open(path), lambda: ReplayStore.create(path.with_name("new.sqlite"))):
            with pytest.raises(ReplayError) as error:
                attempt()
            told.append(str(error.value))
        for file in taken:
            os.close(file)
        assert [row.id for row in store.read(["a"])] == ["a"]
        assert store.append([], [], [trajectory("c", run="run-2")]).inserted == 1
    return told


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted where Linux lists them")
def test_without_file_handles_opening_is_refused_by_name_and_works_again(tmp_path: Path) -> None:
    path = with_two_rows(tmp_path / "replay.sqlite")
    opened, made = in_child(told_without_files, path)
    assert opened.startswith("database must be a readable SQLite file, got 'unable to open database file' at")
    assert "the limit on open files (ulimit -n)" in opened
    assert made.startswith("database must be a writable file in an existing folder, got Too many open files at")


def appended_within(path: Path, room: int) -> tuple[str, str]:
    """A message of 64 MB, with `room` bytes of memory more than now."""
    long = replace(trajectory("c", run="run-2"), messages=(Message("user", "x" * (64 << 20)),))
    with closing(ReplayStore.open(path)) as store:
        store.run()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            store.append([], [], [long])
            failure = "none"
        except (MemoryError, ReplayError) as error:
            failure = type(error).__name__
        return failure, store.read(["a"])[0].id


@pytest.mark.skipif(not os.path.isfile("/proc/self/statm"), reason="memory is counted where Linux tells it")
def test_without_memory_an_append_stores_nothing(tmp_path: Path) -> None:
    path = with_two_rows(tmp_path / "replay.sqlite")
    assert in_child(appended_within, path, 1 << 20) == ("MemoryError", "a")
    check_untouched(path)
