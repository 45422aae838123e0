import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from replay import ReplayError, ReplayStore, questions
from replay.questions import TaskSort
from replay.records import EVICTED, FRESH, ORPHANED, REPLAY, DrawRecord
from replay.storage.databases import Location
from replay.storage.format import schema
from replay.storage.retention import Capacity
from tests.fakes.records import (
    RUN,
    Fresh,
    a_run,
    add_draw,
    iterated,
    iteration_record,
    new_store,
    put,
    set_state,
    sql,
    task,
    trajectory,
)
from tests.fakes.replay_command import ask

OTHER = "run-2"
SOLVED = {"easy": (True, True), "hard": (False, False, False), "half": (True, False), "never": (False,)}


@pytest.fixture(scope="module")
def store(module_store: ReplayStore) -> ReplayStore:
    """A group of each task, in iterations 1 to 4, and of the easy one a group of another run in iteration 9."""
    store = module_store
    store.add_run(a_run(OTHER))
    for iteration, (name, outcomes) in enumerate(SOLVED.items(), 1):
        add_group(store, name, outcomes, iteration=iteration)
    add_group(store, "easy", (False,), iteration=9, run=OTHER)
    # Of the draws one is fresh, and one was never used.
    add_draw(store, "hard-0", slot=0, mean=1.5, largest=2.0)
    add_draw(store, "hard-1", slot=1, mean=2.5, largest=9.0)
    add_draw(store, "half-0", slot=2)
    add_draw(store, "easy-0", slot=3, stream="fresh", mean=1.0, largest=1.0)
    add_draw(store, "easy-0", slot=4, state="reserved")
    return store


def add_group(store: ReplayStore, name: str, outcomes: Sequence[bool], *, iteration: int, run: str = RUN) -> None:
    id = name if run == RUN else f"{run}-{name}"
    place = {"task": name, "iteration": iteration, "run": run}
    rows = [
        trajectory(f"{id}-{slot}", group=id, slot=slot, member=slot, success=solved, reward=float(solved), **place)
        for slot, solved in enumerate(outcomes)
    ]
    share = sum(outcomes) / len(outcomes)
    put(store, *rows, size=len(outcomes), success_rate=share, reward_mean=share)


def listed(store: ReplayStore, sort: TaskSort = TaskSort.unsolved, run: str | None = RUN) -> list[str]:
    return [row["hash"] for row in questions.task_list(store, run, sort=sort)["rows"]]


def test_tasks_that_never_succeeded_come_first_and_of_these_the_most_tried(store: ReplayStore) -> None:
    assert listed(store) == ["hard", "never", "half", "easy"]
    # 2 of 3 attempts over both runs, where it is 1 of 2 of the other task.
    assert listed(store, run=None) == ["hard", "never", "half", "easy"]
    assert listed(store, run=OTHER) == ["easy"]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        (TaskSort.replayed, ["hard", "half", "easy", "never"]),
        (TaskSort.drift, ["hard", "easy", "half", "never"]),
        (TaskSort.attempts, ["hard", "easy", "half", "never"]),
        (TaskSort.last, ["never", "half", "hard", "easy"]),
    ],
)
def test_tasks_are_sorted_by_what_is_asked_greatest_first(store: ReplayStore, sort: TaskSort, order: list[str]) -> None:
    assert listed(store, sort) == order


def test_totals_are_those_of_each_task_s_own_question(store: ReplayStore) -> None:
    answer = questions.task_list(store, RUN, limit=1)
    assert (answer["tasks"], answer["never_solved"], len(answer["rows"])) == (4, 2, 1)
    drawn = answer["rows"][0]
    assert (drawn["prompt"], drawn["replayed"]) == ("Where is the key?", 2)
    assert (drawn["row_drift_mean"], drawn["token_gap_max"]) == (2.0, 9.0)
    for run in (RUN, OTHER, None):
        for row in questions.task_list(store, run)["rows"]:
            whole = questions.task(store, row["hash"], run)
            for name in ("attempts", "successes", "latest_iteration"):
                assert row[name] == whole[name], (run, row["hash"], name)


def test_course_of_a_task_has_its_first_latest_and_best_success_and_its_trend(file_store: ReplayStore) -> None:
    courses = {"rose": (0, 2, 1), "fell": (2, 1, 0), "once": (1,)}
    for name, course in courses.items():
        for iteration, solved in enumerate(course, 1):
            row = trajectory(f"{name}-{iteration}", group=f"{name}-{iteration}", task=name, iteration=iteration)
            put(file_store, row, size=2, success_rate=solved / 2)
    found = {row["hash"]: row for row in questions.task_list(file_store, RUN)["rows"]}
    names = ("first_success", "latest_success", "best_success", "trend")
    assert [found["rose"][name] for name in names] == [0.0, 0.5, 1.0, 0.5]
    assert [found["fell"][name] for name in names] == [1.0, 0.0, 1.0, -1.0]
    assert [found["once"][name] for name in names] == [0.5, 0.5, 0.5, None]
    assert found["rose"]["course"] == [[1, 0.0], [2, 1.0], [3, 0.5]]
    assert listed(file_store, TaskSort.trend) == ["rose", "fell", "once"]
    turned = questions.task_list(file_store, RUN, sort=TaskSort.trend, ascending=True)["rows"]
    assert [row["hash"] for row in turned] == ["fell", "rose", "once"]


def test_groups_of_equal_rewards_have_no_signal_whatever_the_rewards_are(file_store: ReplayStore) -> None:
    kinds = {"equal": {"reward_mean": 0.25, "reward_std": 0.0}, "graded": {"reward_mean": 0.25, "reward_std": 0.1}}
    for name, kind in kinds.items():
        put(file_store, trajectory(name, group=name, task=name), size=2, success_rate=0.0, **kind)
    rows = questions.task_list(file_store, RUN, sort=TaskSort.groups_without_signal)["rows"]
    found = [(row["hash"], row["groups_without_signal"], row["num_groups"]) for row in rows]
    assert found == [("equal", 1, 1), ("graded", 0, 1)]
    assert questions.summary(file_store, RUN)["groups_without_signal"] == 1
    assert "in 2 groups of 2 tasks, 1 of equal rewards" in ask("stats", str(file_store.path)).stdout


def test_evicted_attempts_count_and_those_of_an_undone_iteration_do_not(location: Location) -> None:
    with_gone = iterated(location, count=4)
    ((replayed,),) = sql(with_gone, "select count(*) from draws where stream = 'replay' and state = 'committed'")
    # Both groups of the first iteration go, 2 successes of 4 and 1 of 4; those of the last one are undone.
    with_gone.prune(RUN, rows=schema.trajectories.c.iteration == 1, dry_run=False)
    for (undone,) in sql(with_gone, "select id from trajectories where iteration = 3"):
        set_state(with_gone, undone, "orphaned")
    for _ in range(2):  # while the undone rows are there, and once they are evicted
        (row,) = questions.task_list(with_gone, RUN)["rows"]
        assert (row["attempts"], row["successes"]) == (16, 6)
        whole = questions.task(with_gone, row["hash"], RUN)
        assert [whole[name] for name in ("attempts", "successes", "eligible")] == [16, 6, 8]
        assert row["replayed"] == replayed
        with_gone.evict(RUN, 4, Capacity(age=100))
        with_gone.purge(RUN, 4)


def test_tasks_command_prints_them_and_says_how_many_there_are(store: ReplayStore) -> None:
    where = str(store.path or store.url)
    printed = ask("tasks", where, "--limit", "2").stdout.splitlines()
    assert printed[0] == "4 tasks tried, 2 never solved"
    assert printed[2].split() == [
        *("task", "attempts", "solved", "success", "first", "latest", "best", "trend", "groups", "no", "signal"),
        *("last", "replayed", "drift", "gap", "prompt"),
    ]
    shares = ["0.0", "%"] * 4
    assert printed[3].split()[:16] == ["hard", "3", "0", *shares, "-", "1", "0", "2", "2"]
    assert printed[3].endswith("'Where is the key?'")
    assert printed[-1] == "2 more: add --limit 4"
    assert json.loads(ask("tasks", where, "--json").stdout) == questions.task_list(store, limit=20)


def test_iteration_has_its_policy_metrics_and_groups_and_marks_those_that_teach_nothing(location: Location) -> None:
    store = iterated(location, count=3)
    answer = questions.iteration(store, RUN, 3)
    assert answer["policy"] == {"version": 3, "checkpoint": None}
    assert (answer["metrics"], answer["fraction"]) == ({"actor/grad_norm": 1.5}, 0.2)
    by_slot = {row["slot"]: row for row in answer["trajectories"]}
    assert sorted(slot for each in answer["groups"] for slot in each["slots"]) == sorted(by_slot)
    for each in answer["groups"]:
        assert {by_slot[slot]["group"] for slot in each["slots"]} == {each["id"]}
        assert {by_slot[slot]["stream"] for slot in each["slots"]} == {each["stream"]}
    assert [(len(g["slots"]), g["stream"], g["degenerate"]) for g in answer["groups"]][:2] == [(4, FRESH, False)] * 2
    born = dict(sql(store, "select id, advantage from trajectories"))
    assert all(row["stored_advantage"] == born[row["trajectory"]] for row in answer["trajectories"])
    sql(store, "update groups set reward_std = 0.0 where id = ?", answer["groups"][0]["id"])
    again = questions.iteration(store, RUN, 3)["groups"]
    assert [(group["degenerate"], group["teaches"]) for group in again][:2] == [(True, True), (False, True)]
    sql(store, "update draws set advantage = 0.0 where iteration = 3 and slot < 4")
    assert [group["teaches"] for group in questions.iteration(store, RUN, 3)["groups"]][:2] == [False, True]


def test_an_iteration_outlives_the_content_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    with closing(iterated(path, count=3)) as store:
        before = questions.iteration(store, RUN, 2)
    assert "removed the content of 16" in ask("forget", str(path), "--where", "iteration < 3", "--yes").output
    with closing(ReplayStore.open(path, read_only=True)) as store:
        after = questions.iteration(store, RUN, 2)
    assert {row["state"] for row in after["trajectories"]} == {EVICTED}
    for row in (*before["trajectories"], *after["trajectories"]):
        del row["state"], row["state_reason"]
    assert after == before


def tried(location: Location) -> ReplayStore:
    """The same task in three iterations, 1, 2 and 4 of 4 successful; of the last only one row is left to draw."""
    store = new_store(location)
    for iteration, rate in ((1, 0.25), (2, 0.5), (3, 1.0)):
        Fresh(iteration, rates=(rate,)).append_to(store)
    sql(store, 'update "groups" set reward_mean = success_rate')
    for (id,) in sql(store, "select id from trajectories where iteration = 3 and member > 0"):
        set_state(store, id, EVICTED)
    return store


def test_task_has_its_attempts_by_group_and_by_policy(location: Location) -> None:
    store = tried(location)
    answer = questions.task(store, "task")
    assert (answer["hash"], answer["environment"], answer["payload"]["hops"]) == ("task-1", "lookup_chain", 2)
    assert (answer["attempts"], answer["successes"], answer["reward_mean"]) == (12, 7, pytest.approx(7 / 12))
    assert (answer["eligible"], answer["first_iteration"], answer["latest_iteration"], answer["runs"]) == (9, 1, 3, 1)
    found = [(v["version"], v["attempts"], v["successes"]) for v in answer["versions"]]
    assert found == [(0, 4, 1), (1, 4, 2), (2, 4, 4)]
    got = [(g["iteration"], g["successes"], g["size"], g["eligible"]) for g in answer["groups"]]
    assert got == [(3, 4, 4, 1), (2, 2, 4, 4), (1, 1, 4, 4)]
    assert answer["prompt"] and answer["prompt"][-1]["role"] != "assistant"
    json.dumps(answer, allow_nan=False)


def test_task_counts_what_updates_drew_of_it_and_not_what_a_resume_undid(location: Location) -> None:
    store = tried(location)
    ((id,),) = sql(store, "select id from trajectories where iteration = 1 and member = 0")
    rows = [DrawRecord(RUN, 2, slot, str(id), REPLAY, probability=None, staleness=1) for slot in (0, 1)]
    store.reserve_fresh(rows)
    store.commit(iteration_record(2, replay=2), rows, sampler_state={})
    answer = questions.task(store, "task-1", RUN)
    assert answer["replayed"] == 2
    assert [group["replayed"] for group in answer["groups"]] == [0, 0, 2]
    assert {row["id"]: row["uses"] for row in answer["trajectories"]}[id] == 2
    for (other,) in sql(store, "select id from trajectories where iteration = 3"):
        set_state(store, other, ORPHANED)
    after = questions.task(store, "task-1", RUN)
    assert (after["attempts"], after["orphaned"], after["latest_iteration"]) == (8, 4, 2)
    assert len(after["trajectories"]) == 12
    assert questions.task(store, "task-1", "other")["attempts"] == 0


def test_tasks_of_no_or_several_hashes_are_refused(location: Location) -> None:
    store = tried(location)
    store.append([task("task-2")], [], [])
    for prefix, which in (("nope", "none"), ("", "none"), ("task-", "more than one: task-1, task-2")):
        with pytest.raises(ReplayError, match=f"HASH must be the beginning of one task's hash in .* begins {which}"):
            questions.task(store, prefix)


def test_hindsight_is_no_attempt_at_a_task(file_store: ReplayStore) -> None:
    lost = {"group": "failed", "reward": 0.0, "success": False}
    failed = [trajectory(f"f{slot}", slot=slot, member=slot, **lost) for slot in (0, 1)]
    put(file_store, *failed, trajectory("told", slot=2, group="a-told", source="hindsight", parent="f0"))
    for _ in range(2):  # while the row is there, and once a few numbers are left of it
        (found,) = questions.task_list(file_store, RUN)["rows"]
        assert (found["attempts"], found["best_success"], found["num_groups"]) == (2, 0.5, 1)
        assert sql(file_store, "select attempts, latest_success from v_tasks") == [(2, 0.5)]
        assert sql(file_store, "select count(*) from v_groups") == [(1,)]
        file_store.forget(schema.trajectories.c.id == "told", dry_run=False)
