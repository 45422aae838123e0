"""What deterministic tools answered is kept by task, and goes with what was said of it."""

from __future__ import annotations

from dataclasses import replace

from replay.records import ObservationRecord
from replay.storage.format.schema import trajectories
from replay.store import ReplayStore
from tests.fakes.records import FreshRows


def test_answers_come_back_by_task_and_environment_and_are_forgotten_with_its_rows(store: ReplayStore) -> None:
    FreshRows(1).append_to(store)
    first = ObservationRecord("call-0", "task-1", "tools-1", None, "look", {"key": "ü", "n": 0}, "a\nb")
    second, other = replace(first, id="call-1", parent="call-0"), replace(first, id="call-2", environment="tools-2")
    store.remember([second, first, other])
    assert sorted(store.remembered("tools-1", ["task-1"]), key=lambda record: record.id) == [first, second]
    assert store.remembered("tools-1", ["another"]) == []
    assert store.remembered("tools-2", ["task-1"]) == [other]
    store.forget(trajectories.c.iteration == 1, dry_run=False)
    assert store.remembered("tools-1", ["task-1"]) == []
