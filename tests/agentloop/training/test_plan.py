from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentloop.training.plan import TaskQueue


def test_tasks_come_one_after_another() -> None:
    line = TaskQueue()
    assert line.upcoming(3) == [0, 1, 2]
    line.advance([0, 1, 2])
    assert line.upcoming(2) == [3, 4]


def test_a_task_without_a_member_comes_first_the_next_time() -> None:
    line = TaskQueue()
    line.advance([0, 1, 2], without_member=[1])
    assert line.upcoming(3) == [1, 3, 4]
    line.advance([1, 3, 4], without_member=[1, 4])
    assert line.upcoming(2) == [1, 4]
    line.advance([1])  # a smaller batch than was looked at
    assert line.upcoming(3) == [4, 5, 6]


def test_a_batch_without_tasks_advances_nothing() -> None:
    line = TaskQueue(next=5, pending=[2])
    line.advance([])
    assert line.upcoming(2) == [2, 5]


@given(st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(0, 5))), max_size=30))
def test_no_task_is_left_out_and_none_is_gone_through_twice(batches: list[tuple[int, set[int]]]) -> None:
    line, been = TaskQueue(), list[int]()
    for count, lost in batches:
        indices = line.upcoming(count)
        without = [index for slot, index in enumerate(indices) if slot in lost]
        been += [index for index in indices if index not in without]
        line.advance(indices, without_member=without)
    assert len(set(been)) == len(been)
    assert sorted([*been, *line.pending]) == list(range(line.next))
