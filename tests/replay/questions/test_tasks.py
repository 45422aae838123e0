"""All tasks beside each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from replay import ReplayStore, questions
from replay.questions import TaskSort
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from replay.storage.format import schema
from tests.fakes.databases import Databases
from tests.fakes.records import RUN, group, iterate, new_store, run_record, set_state, sql, task, trajectory
from tests.fakes.replay_command import ask

OTHER = "run-2"
SOLVED = {"easy": (True, True), "hard": (False, False, False), "half": (True, False), "never": (False,)}


@pytest.fixture(scope="module")
def store(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    """A group of each task, in iterations 1 to 4, and of the easy one a group of another run in iteration 9."""
    store = new_store(databases.new(tmp_path_factory.mktemp("tasks") / "replay.sqlite"))
    store.add_run(run_record(OTHER))
    for iteration, (name, outcomes) in enumerate(SOLVED.items(), 1):
        add_group(store, name, outcomes, iteration=iteration)
    add_group(store, "easy", (False,), iteration=9, run=OTHER)
    # Of the draws one is fresh, and one was never used.
    drawn = [
        ("hard-0", "replay", "committed", 1.5, 2.0),
        ("hard-1", "replay", "committed", 2.5, 9.0),
        ("half-0", "replay", "committed", None, None),
        ("easy-0", "fresh", "committed", 1.0, 1.0),
        ("easy-0", "replay", "reserved", None, None),
    ]
    for slot, (id, *found) in enumerate(drawn):
        statement = (
            "insert into draws (run, iteration, slot, trajectory, stream, state, drift_mean, drift_max) "
            "values (?, 5, ?, ?, ?, ?, ?, ?)"
        )
        sql(store, statement, RUN, slot, id, *found)
    yield store
    store.close()


def add_group(store: ReplayStore, name: str, outcomes: Sequence[bool], *, iteration: int, run: str = RUN) -> None:
    id = name if run == RUN else f"{run}-{name}"
    place = {"task": name, "iteration": iteration, "run": run}
    rows = [
        trajectory(f"{id}-{slot}", group=id, slot=slot, member=slot, success=solved, reward=float(solved), **place)
        for slot, solved in enumerate(outcomes)
    ]
    share = sum(outcomes) / len(outcomes)
    store.append([task(name)], [group(id, size=len(outcomes), success_rate=share, reward_mean=share, **place)], rows)


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
def test_tasks_are_sorted_by_what_is_asked_the_greatest_first(
    store: ReplayStore, sort: TaskSort, order: list[str]
) -> None:
    assert listed(store, sort) == order


def test_totals_are_those_of_each_task_s_own_question(store: ReplayStore) -> None:
    answer = questions.task_list(store, RUN, limit=1)
    assert (answer["tasks"], answer["never_solved"], len(answer["rows"])) == (4, 2, 1)
    drawn = answer["rows"][0]
    assert (drawn["prompt"], drawn["replayed"]) == ("Where is the key?", 2)
    assert (drawn["drift_mean"], drawn["drift_max"]) == (2.0, 9.0)
    for run in (RUN, OTHER, None):
        for row in questions.task_list(store, run)["rows"]:
            whole = questions.task(store, row["hash"], run)
            for name in ("attempts", "successes", "eligible", "last_iteration"):
                assert row[name] == whole[name], (run, row["hash"], name)


def test_evicted_attempts_count_and_those_of_an_undone_iteration_do_not(location: Location) -> None:
    with_gone = new_store(location)
    for iteration in (1, 2, 3):
        iterate(with_gone, iteration, make_sampler("uniform", 0), count=4)
    ((replayed,),) = sql(with_gone, "select count(*) from draws where stream = 'replay' and state = 'committed'")
    # Both groups of the first iteration go, 2 successes of 4 and 1 of 4; those of the last one are undone.
    with_gone.prune(RUN, rows=schema.trajectories.c.iteration == 1, dry_run=False)
    for (undone,) in sql(with_gone, "select id from trajectories where iteration = 3"):
        set_state(with_gone, undone, "orphaned")
    (row,) = questions.task_list(with_gone, RUN)["rows"]
    assert (row["attempts"], row["successes"], row["eligible"]) == (16, 6, 8)
    whole = questions.task(with_gone, row["hash"], RUN)
    assert [whole[name] for name in ("attempts", "successes", "eligible")] == [16, 6, 8]
    assert row["replayed"] == replayed
    with_gone.close()


def test_tasks_command_prints_them_and_says_how_many_there_are(store: ReplayStore) -> None:
    where = str(store.path or store.url)
    printed = ask("tasks", where, "--limit", "2").stdout.splitlines()
    assert printed[0] == "4 tasks tried, 2 never solved"
    assert printed[2].split() == [
        *("task", "attempts", "solved", "success", "last", "stored", "replayed", "drift", "most", "prompt")
    ]
    assert printed[3].split()[:9] == ["hard", "3", "0", "0.0", "%", "2", "3", "2", "2.000"]
    assert printed[3].endswith("'Where is the key?'")
    assert printed[-1] == "2 more: add --limit 4"
    assert json.loads(ask("tasks", where, "--json").stdout) == questions.task_list(store, limit=20)
