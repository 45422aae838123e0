"""Several processes at once, and processes that die."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay.storage.databases import Location
from tests.fakes.records import sql
from tests.replay.storage.writers import Writer, begin, check_acknowledged, check_whole, kill_writers, stored_ids


@pytest.fixture
def begun(location: Location) -> Location:
    begin(location)
    return location


def many_writers(location: Location, *, writers: int, each: int) -> None:
    """F7: they lose nothing, nobody sees an error, and a reader never sees a half."""
    running = [Writer.start(location, number, each) for number in range(writers)]
    seen: list[str] = []
    while any(writer.process.is_alive() for writer in running):
        now = stored_ids(location)
        check_whole(location, sorted(set(now) - set(seen)))
        assert set(seen) <= set(now)
        seen = now
    assert check_acknowledged(location, running) == writers * each
    assert [writer.process.exitcode for writer in running] == [0] * writers


def test_four_writers_lose_nothing_and_a_reader_sees_no_half(begun: Location) -> None:
    many_writers(begun, writers=4, each=50)


def test_kill_of_a_writer_loses_nothing_that_was_acknowledged(begun: Location) -> None:
    kill_writers(begun, 25)
    if isinstance(begun, Path):
        assert sql(begun, "pragma integrity_check") == [("ok",)]


@pytest.mark.soak
@pytest.mark.every_server
def test_thirty_two_writers_lose_nothing_and_a_reader_sees_no_half(begun: Location) -> None:
    many_writers(begun, writers=32, each=250)


@pytest.mark.soak
@pytest.mark.every_server
def test_five_hundred_kills_lose_nothing_that_was_acknowledged(begun: Location) -> None:
    kill_writers(begun, 500)
    if isinstance(begun, Path):
        assert sql(begun, "pragma integrity_check") == [("ok",)]
