from dataclasses import replace

import pytest

from context.messages import Message
from replay import ReplayStore
from replay.questions.outcomes import outcomes
from tests.fakes.records import MESSAGES, RUN, put, set_state, trajectory


@pytest.fixture(scope="module")
def store(module_store: ReplayStore) -> ReplayStore:
    """20 failures, half of which say "maybe" and time out, and 20 successes; a failure that was undone."""
    for number in range(40):
        fails, late = number < 20, number < 10
        said = Message("assistant", f"{'maybe' if late else 'surely'} the drawer", author="llm")
        row = trajectory(
            f"row-{number}",
            group=f"group-{number}",
            slot=number,
            messages=(*MESSAGES[:-1], said),
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


def test_words_are_those_clearly_more_frequent_in_failures(store: ReplayStore) -> None:
    found = outcomes(store, RUN)
    assert [row["word"] for row in found["words"]] == ["maybe"]
    # 10 of 20 and 0 of 20 episodes; its prior is 10 x (10 + 0.5) / (40 + 1) = 2.561 of 10 episodes.
    # log((12.561 / 17.439) / (2.561 / 27.439)) / sqrt(1 / 12.561 + 1 / 2.561) = 2.0439 / 0.6856
    assert found["words"][0]["z"] == pytest.approx(2.981, abs=1e-3)
    assert found["sampled"] == {"failed": 20, "successful": 20}


def test_filters_choose_the_episodes_and_one_outcome_alone_has_no_words(store: ReplayStore) -> None:
    found = outcomes(store, RUN, ["stop_reason == 'max_turns'"])
    assert (found["episodes"], found["words"]) == ({"failed": 10, "successful": 0}, [])
    assert found["stop_reasons"] == [{"name": "max_turns", "failed": 1.0, "successful": None}]
