from dataclasses import replace

import pytest

from replay import ReplayStore
from replay.questions.outcomes import outcomes
from tests.fakes.records import RUN, put, set_state, trajectory


@pytest.fixture(scope="module")
def store(module_store: ReplayStore) -> ReplayStore:
    """20 failures, half of which time out, and 20 successes; a failure that was undone."""
    for number in range(40):
        fails, late = number < 20, number < 10
        row = trajectory(
            f"row-{number}",
            group=f"group-{number}",
            slot=number,
            success=not fails,
            reward=float(not fails),
            stop_reason="max_turns" if late else "answered",
            error_kinds="raised raised malformed" if number % 4 == 0 and fails else None,
            num_turns=6 if late else 2,
        )
        put(module_store, row)
    put(module_store, replace(trajectory("undone", group="undone", success=False, stop_reason="overtime")))
    set_state(module_store, "undone", "orphaned")
    return module_store


def test_shares_are_of_the_episodes_of_each_outcome(store: ReplayStore) -> None:
    found = outcomes(store, RUN)
    assert found["episodes"] == {"failed": 20, "successful": 20}
    assert found["stop_reasons"] == [
        {"name": "max_turns", "failed": 0.5, "successful": 0.0},
        {"name": "answered", "failed": 0.5, "successful": 1.0},
    ]
    # Two calls of an episode that raised are one episode; 5 of 20 failures have some.
    kinds = {row["name"]: (row["failed"], row["successful"]) for row in found["error_kinds"]}
    assert kinds == {"malformed": (0.25, 0.0), "raised": (0.25, 0.0)}
    means = {row["name"]: (row["failed"], row["successful"]) for row in found["means"]}
    assert (means["num_turns"], means["reward"]) == ((4.0, 2.0), (0.0, 1.0))
