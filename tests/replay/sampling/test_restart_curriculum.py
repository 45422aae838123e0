"""Which successes new groups begin in, and where: all of it follows from the rows that are stored."""

from typing import Any

import pytest

from replay.records import ORPHANED
from replay.sampling.restart_curriculum import replies_to_keep, restartable
from replay.storage.format import schema
from replay.storage.retention import Capacity
from replay.store import ReplayStore
from tests.fakes.records import RUN, put, set_state, trajectory


@pytest.mark.parametrize(
    ("replies", "latest", "kept"),
    [
        (5, None, 4),  # the last reply is still to come
        (1, None, 0),  # there is nothing to begin behind
        (5, (4, 0.5), 3),  # half is enough
        (5, (4, 0.49), 4),
        (5, (4, 0.0), 4),  # never behind the last but one
        (5, (2, 0.0), 3),
        (5, (2, 0.125), 2),
        (5, (1, 0.5), 0),  # done: the next one would begin at the start
        (5, (1, 0.0), 2),
    ],
)
def test_a_cut_goes_back_where_half_succeed_and_forth_where_none_does(
    replies: int, latest: tuple[int, float] | None, kept: int
) -> None:
    assert replies_to_keep(replies, latest) == kept


def found(store: ReplayStore) -> list[tuple[str, int]]:
    with store.reading() as connection:
        return restartable(connection, RUN)


def tried(store: ReplayStore, task: str, iteration: int, rate: float, **changes: Any) -> str:
    """The id of one of eight members of a group that is stored, of four replies."""
    id = f"{task}-{iteration}{changes.get('source', '')}"
    place = {"task": task, "iteration": iteration, "slot": int(task[-1]), "group": id}
    put(store, trajectory(id, **{**place, "num_turns": 4, **changes}), success_rate=rate, size=8)
    return id


@pytest.mark.every_database
def test_tasks_that_succeed_least_often_from_the_start_come_first_with_their_latest_success(store: ReplayStore) -> None:
    tried(store, "task-1", 1, 0.25)
    tried(store, "task-1", 2, 0.75)  # half of all attempts
    tried(store, "task-2", 1, 0.5)
    tried(store, "task-3", 1, 0.125)
    tried(store, "task-4", 1, 0.0, success=False)  # nothing to begin in
    tried(store, "task-5", 1, 0.1, num_turns=1)
    tried(store, "task-6", 1, 0.1, source="hindsight")
    assert found(store) == [("task-3-1", 3), ("task-1-2", 3), ("task-2-1", 3)]
    # What became of a restart says nothing of the task.
    tried(store, "task-3", 3, 1.0, source="restart", parent="task-3-1", kept_turns=3)
    assert found(store) == [("task-3-1", 2), ("task-1-2", 3), ("task-2-1", 3)]


@pytest.mark.every_database
def test_the_latest_group_decides_also_once_it_is_evicted_and_not_one_that_was_undone(store: ReplayStore) -> None:
    begun: dict[str, Any] = {"source": "restart", "parent": tried(store, "task-1", 1, 0.25)}
    tried(store, "task-1", 2, 1.0, kept_turns=3, **begun)
    latest = tried(store, "task-1", 3, 0.5, kept_turns=2, **begun)
    set_state(store, tried(store, "task-1", 4, 0.0, kept_turns=1, **begun), ORPHANED)
    assert found(store) == [("task-1-1", 1)]
    store.prune(rows=schema.trajectories.c.id == latest, dry_run=False)
    assert found(store) == [("task-1-1", 1)]
    tried(store, "task-1", 5, 0.75, kept_turns=1, **begun)
    assert found(store) == []


@pytest.mark.every_database
def test_groups_that_a_resume_undid_say_nothing_once_they_are_evicted_either(store: ReplayStore) -> None:
    begun: dict[str, Any] = {"source": "restart", "parent": tried(store, "task-1", 1, 0.25)}
    tried(store, "task-2", 1, 0.5)
    tried(store, "task-1", 2, 1.0, kept_turns=3, **begun)
    # These would make task-1's success done, and task-2 the one that succeeds least often.
    set_state(store, tried(store, "task-1", 4, 1.0, kept_turns=1, **begun), ORPHANED)
    set_state(store, tried(store, "task-2", 5, 0.0, success=False), ORPHANED)
    expected = [("task-1-1", 2), ("task-2-1", 3)]
    assert found(store) == expected
    store.evict(RUN, 4, policy_version=4, capacity=Capacity(age=100))
    assert found(store) == expected
    store.purge(RUN, 4)
    assert found(store) == expected
