import numpy as np
import pytest

from replay import ReplayStore
from replay.questions.replayed import after_replay, stream_shares, token_gaps
from replay.storage.format.schema import trajectories
from tests.fakes.records import RUN, SHORT, add_draw, put, sql, trajectory

COURSES = {"replayed": (0.0, 0.5, 1.0), "alone": (0.0, 0.0, 0.5)}
"""Success of a task's groups in iterations 1, 3 and 5."""


@pytest.fixture(scope="module")
def store(module_store: ReplayStore) -> ReplayStore:
    for name, course in COURSES.items():
        for iteration, success in zip((1, 3, 5), course, strict=True):
            id = f"{name}-{iteration}"
            row = trajectory(id, group=id, task=name, iteration=iteration)
            put(module_store, row, size=2, success_rate=success, reward_mean=2 * success)
    add_draw(module_store, "replayed-1", iteration=2, slot=1, largest=3.0)
    add_draw(module_store, "alone-1", iteration=2, slot=0, stream="fresh", largest=1.0)
    # After the group of iteration 3 there is no replay but one that no update used; at 5, no group follows.
    add_draw(module_store, "replayed-3", iteration=4, slot=0, state="reserved", largest=9.0)
    add_draw(module_store, "alone-1", iteration=5, slot=0, largest=2.0)
    sql(module_store, "update draws set advantage = -1.5 where stream = 'replay'")
    sql(module_store, "update draws set weight = 0.5 where trajectory = 'replayed-1'")
    sql(module_store, "update draws set advantage = 0.25 where stream = 'fresh'")
    return module_store


def test_next_group_is_compared_by_whether_its_task_was_replayed_since_the_one_before(store: ReplayStore) -> None:
    found = {(row.pop("before"), row.pop("replayed")): row for row in after_replay(store, RUN)}
    assert found["none", True] == {"pairs": 1, "better": 1.0, "success": 0.5, "reward": 1.0}
    # Of the other task two pairs: from 0 to 0, and from 0 to 0.5.
    assert found["none", False] == {"pairs": 2, "better": 0.5, "success": 0.25, "reward": 0.5}
    assert found["some", False] == {"pairs": 1, "better": 1.0, "success": 0.5, "reward": 1.0}
    assert {key for key, row in found.items() if not row["pairs"]} == {("some", True), ("all", True), ("all", False)}


def test_only_groups_of_the_newest_iterations_are_compared(store: ReplayStore) -> None:
    pairs = [(row["replayed"], row["pairs"]) for row in after_replay(store, RUN, newest=3) if row["pairs"]]
    assert pairs == [(False, 1), (False, 1)]  # of each task from iteration 3 to 5


def test_replay_of_a_row_that_is_evicted_by_now_counts(file_store: ReplayStore) -> None:
    for iteration in (1, 3):
        put(file_store, trajectory(f"row-{iteration}", group=f"g{iteration}", iteration=iteration), size=2)
    add_draw(file_store, "row-1", iteration=2)
    before = after_replay(file_store, RUN)
    file_store.prune(RUN, rows=trajectories.c.id == "row-1", dry_run=False)
    assert sql(file_store, "select id from reclaimed") == [("row-1",)]
    assert [row["pairs"] for row in before if row["replayed"]] == [0, 1, 0] and after_replay(file_store, RUN) == before


def test_replay_s_share_of_an_update_is_of_its_rows_and_of_their_weighted_advantages(store: ReplayStore) -> None:
    # |-1.5 x 0.5| of |-1.5 x 0.5| + |0.25 x 1|
    found = stream_shares(store, RUN)
    assert found == [{"iteration": 2, "rows": 0.5, "advantage": 0.75}, {"iteration": 5, "rows": 1.0, "advantage": 1.0}]


def test_largest_gaps_are_found_over_all_updates_and_in_scored_tokens(store: ReplayStore) -> None:
    current = np.where(np.isnan(SHORT.behavior_log_probs), np.nan, -0.5).astype(np.float32)
    store.add_scores(RUN, 1, {("alone-1", 0): current, ("alone-3", 0): np.full(6, np.nan, np.float32)})
    found = token_gaps(store, RUN, limit=2)
    assert found["rows"] == [
        {"trajectory": "replayed-1", "gap": 3.0, "replayed": 1},
        {"trajectory": "alone-1", "gap": 2.0, "replayed": 1},
    ]
    # Sampled tokens 2, 3 and 5 have log-probs -0.5, -1 and -1.5.
    place = {"trajectory": "alone-1", "segment": 0}
    assert found["tokens"] == [
        {**place, "token": 5, "gap": 1.0, "sampled": -1.5, "now": -0.5},
        {**place, "token": 3, "gap": 0.5, "sampled": -1.0, "now": -0.5},
    ]
    assert (found["scored"], found["of_scored"]) == (2, 2)
