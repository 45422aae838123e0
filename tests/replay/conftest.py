"""Buffers that hold a run, its first policy, and no row yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from replay import ReplayStore
from replay.storage.databases import Location
from tests.fakes.records import new_store


@pytest.fixture
def store(location: Location) -> Iterator[ReplayStore]:
    """A test that takes it runs on every kind of database."""
    with closing(new_store(location)) as store:
        yield store


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[ReplayStore]:
    """For tests of what has nothing of the database in it."""
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        yield store
