from collections.abc import Iterator
from contextlib import closing

import pytest

from replay import ReplayStore
from replay.open_buffer import OpenBuffer
from replay.pages.app import create_app
from tests.replay.pages.hostile import hostile_buffer
from tests.replay.pages.serving import Served, inspecting, served

TOKEN = "a-token-of-enough-characters"


@pytest.fixture(scope="session")
def hostile_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    path = tmp_path_factory.mktemp("hostile") / "replay.sqlite"
    hostile_buffer(path).close()
    with closing(ReplayStore.open(path, read_only=True)) as store:
        yield store


@pytest.fixture(scope="session")
def inspector(hostile_store: ReplayStore) -> Iterator[Served]:
    with inspecting(hostile_store) as server:
        yield server


@pytest.fixture(scope="session")
def locked_inspector(hostile_store: ReplayStore) -> Iterator[Served]:
    with served(create_app(OpenBuffer(hostile_store), token=TOKEN, host="0.0.0.0")) as server:
        yield server
