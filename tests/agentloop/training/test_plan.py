from dataclasses import asdict
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from agentloop.training.loop_state import EnvironmentTurns, TaskQueue


def test_a_task_without_a_member_comes_first_the_next_time() -> None:
    line = TaskQueue()
    line.advance([0, 1, 2], without_member=[1])
    assert line.upcoming(3) == [1, 3, 4]
    line.advance([1, 3, 4], without_member=[1, 4])
    assert line.upcoming(2) == [1, 4]
    line.advance([1])  # a smaller batch than was looked at
    assert line.upcoming(3) == [4, 5, 6]


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


def go_on(line: TaskQueue, sizes: list[int]) -> list[int]:
    """Groups of these sizes are collected of the next tasks."""
    numbers = line.upcoming(len(sizes))
    line.advance(numbers, collected=lambda turns: turns.planned(numbers, enumerate(sizes)))
    return numbers


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.lists(st.integers(0, 5), max_size=30))
def test_no_environment_is_a_whole_group_away_from_its_share(weights: list[int], batches: list[int]) -> None:
    shares = [weight / 100 for weight in weights]
    line = TaskQueue(turns=EnvironmentTurns.begin(shares, 8))
    been: list[int] = []
    for count in batches:
        been += go_on(line, [8] * count)
        assert line.turns is not None
        for episodes, weight in zip(line.turns.episodes, weights, strict=True):
            assert abs(episodes - Fraction(weight, sum(weights)) * sum(line.turns.episodes)) < 8
    assert len(set(been)) == len(been)


@given(st.lists(st.lists(st.integers(1, 8), max_size=4), max_size=40))
def test_smaller_groups_are_made_up_for(batches: list[list[int]]) -> None:
    line = TaskQueue(turns=EnvironmentTurns.begin([0.5, 0.3, 0.2], 8))
    for sizes in batches:
        go_on(line, sizes)
        line = TypeAdapter(TaskQueue).validate_python(asdict(line))  # as a resume has it
    assert line.turns is not None
    total = sum(line.turns.episodes)
    for episodes, share in zip(line.turns.episodes, (5, 3, 2), strict=True):
        assert abs(episodes - total * share / 10) < 16
