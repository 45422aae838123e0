from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from replay import ReplayStore
from replay.storage.databases import Location
from tests.fakes.databases import Databases
from tests.fakes.records import iterated, new_store


@pytest.fixture
def store(location: Location) -> Iterator[ReplayStore]:
    """A test that takes it runs on every kind of database."""
    with closing(new_store(location)) as store:
        yield store


@pytest.fixture(scope="module")
def module_store(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    """One for all tests of a module, that is filled once; on every kind of database."""
    with closing(new_store(databases.new(tmp_path_factory.mktemp("module") / "replay.sqlite"))) as store:
        yield store


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[ReplayStore]:
    """For tests of what has nothing of the database in it."""
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        yield store


@pytest.fixture(scope="session")
def three_iterations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    """24 fresh rows of three iterations, two drawn in each; to be read only."""
    path = tmp_path_factory.mktemp("run") / "replay.sqlite"
    iterated(path).close()
    with closing(ReplayStore.open(path, read_only=True)) as reader:
        yield reader
