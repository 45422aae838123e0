"""Which successes new groups begin in, and where: all of it follows from the rows that are stored."""

import pytest

from replay.records import ORPHANED
from replay.sampling.restart_places import replies_to_keep, restartable
from replay.storage.format import schema
from replay.store import ReplayStore
from tests.fakes.records import RUN, put, set_state, trajectory


@pytest.mark.parametrize(
    ("replies", "latest", "kept"),
    [
        (5, None, 4),  # the last reply is still to come
        (2, None, 1),
        (1, None, 0),  # there is nothing to begin behind
        (5, (4, 1.0), 3),
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


def tried(store: ReplayStore, task: str, iteration: int, rate: float, **changes: object) -> str:
    """A group of a task in an iteration, one of whose members is stored; its id."""
    name, slot = f"{task}-{iteration}", int(task[-1])
    given = {"num_turns": 4, "task": task, "iteration": iteration, "slot": slot, "group": name, **changes}
    put(store, trajectory(name, **given), success_rate=rate, size=8)  # type: ignore[arg-type]
    return name


def begun(store: ReplayStore, parent: str, kept: int, iteration: int, rate: float) -> str:
    name, task = f"{parent}-{iteration}", parent[:6]
    place = {"task": task, "iteration": iteration, "slot": int(task[-1]), "group": name}
    row = trajectory(name, source="restart", parent=parent, kept_turns=kept, **place)
    put(store, row, success_rate=rate, size=8)
    return name


def found(store: ReplayStore) -> list[tuple[str, int]]:
    with store.reading() as connection:
        return restartable(connection, RUN)


def test_tasks_that_succeed_least_often_from_the_start_come_first_with_their_latest_success(
    file_store: ReplayStore,
) -> None:
    tried(file_store, "task-1", 1, 0.25)
    tried(file_store, "task-1", 2, 0.75)  # half of all attempts
    tried(file_store, "task-2", 1, 0.5)
    tried(file_store, "task-3", 1, 0.125)
    tried(file_store, "task-4", 1, 0.0, success=False)  # nothing to begin in
    tried(file_store, "task-5", 1, 0.1, num_turns=1)
    tried(file_store, "task-6", 1, 0.1, source="hindsight")
    assert found(file_store) == [("task-3-1", 3), ("task-1-2", 3), ("task-2-1", 3)]
    # What became of a restart says nothing of the task.
    begun(file_store, "task-3-1", 3, 3, 1.0)
    assert found(file_store) == [("task-3-1", 2), ("task-1-2", 3), ("task-2-1", 3)]


def test_the_latest_group_decides_also_once_it_is_evicted_and_not_one_that_was_undone(file_store: ReplayStore) -> None:
    tried(file_store, "task-1", 1, 0.25)
    begun(file_store, "task-1-1", 3, 2, 1.0)
    latest = begun(file_store, "task-1-1", 2, 3, 0.5)
    assert found(file_store) == [("task-1-1", 1)]
    set_state(file_store, begun(file_store, "task-1-1", 1, 4, 0.0), ORPHANED)
    assert found(file_store) == [("task-1-1", 1)]
    file_store.prune(rows=schema.trajectories.c.id == latest, dry_run=False)
    assert found(file_store) == [("task-1-1", 1)]
    begun(file_store, "task-1-1", 1, 5, 0.75)
    assert found(file_store) == []
