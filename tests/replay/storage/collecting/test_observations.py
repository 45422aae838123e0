"""What deterministic tools answered is kept by task, and goes with what was said of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from replay.records import ObservationRecord
from replay.storage.databases import Location
from replay.storage.format.schema import trajectories
from replay.store import ReplayStore
from tests.fakes.records import FreshRows, new_store

ENVIRONMENT = "tools-1"


@pytest.fixture
def store(location: Location) -> Iterator[ReplayStore]:
    with closing(new_store(location)) as store:
        FreshRows(1).append_to(store)
        yield store


def answered(number: int = 0, **changes: object) -> ObservationRecord:
    """By a tool of the task of `FreshRows`."""
    made = ObservationRecord(f"call-{number}", "task-1", ENVIRONMENT, None, "look", {"key": "ü", "n": number}, "a\nb")
    return replace(made, **changes)  # type: ignore[arg-type]


def test_answers_come_back_by_task_and_environment(store: ReplayStore) -> None:
    first, second = answered(), answered(1, parent="call-0")
    other = answered(2, environment="tools-2")
    store.remember([second, first, other])
    assert sorted(store.remembered(ENVIRONMENT, [first.task]), key=lambda record: record.id) == [first, second]
    assert store.remembered(ENVIRONMENT, ["another"]) == []
    assert store.remembered("tools-2", [first.task, "another"]) == [other]


def test_what_is_forgotten_takes_the_answers_of_its_task_along(store: ReplayStore) -> None:
    first = answered()
    store.remember([first])
    store.forget(trajectories.c.iteration == 1, dry_run=False)
    assert store.remembered(ENVIRONMENT, [first.task]) == []
