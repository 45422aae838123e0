import pytest

from context.messages import Message
from replay import ReplayError, ReplayStore, questions
from replay.open_buffer import OpenBuffer
from replay.pages.app import create_app
from replay.questions import Query
from replay.questions.slices import held_out_row, slices, unsolved_held_out
from replay.questions.trajectory import shorten_conversations
from replay.records import REMOVED_TASK, HeldOutEpisode, TaskRecord
from tests.fakes.records import RUN, group, sql, trajectory
from tests.replay.pages.serving import served

pytestmark = pytest.mark.every_database
KINDS = {"a": (2, "easy", True), "b": (2, "hard", False), "c": (3, "easy", False), "d": (3, "hard", True)}
TASKS = [
    TaskRecord(name, "chain", {"hops": hops, "size": 2.5, "info": {"level": level}, "long": is_long, "name": name})
    for name, (hops, level, is_long) in KINDS.items()
]


@pytest.fixture(scope="module")
def store(module_store: ReplayStore) -> ReplayStore:
    """Of each task a group of two in iterations 1 to 26: of two hops both succeed, of three hops one from 14 on."""
    for iteration in range(1, 27):
        for slot, task in enumerate(TASKS):
            name, solved = f"{iteration}-{task.hash}", 2 if task.payload["hops"] == 2 else int(iteration >= 14)
            place = {"task": task.hash, "iteration": iteration}
            rows = [
                trajectory(f"{name}{member}", group=name, slot=2 * slot + member, success=member < solved, **place)
                for member in (0, 1)
            ]
            module_store.append([task], [group(name, success_rate=solved / 2, **place)], rows)
    for iteration, solved in ((0, "ac"), (10, "abc"), (20, "ab")):
        episodes = [
            HeldOutEpisode(RUN, iteration, number, task, "chain", "1", 0.0, task in solved, "answered", None, 1, 0,
                           (Message("user", f"Find the code. Task {task}?"),))
            for number, task in enumerate("abcd")
        ]  # fmt: skip
        module_store.keep_held_out(RUN, episodes, evaluations=9)
    return module_store


def cells(store: ReplayStore, by: str | None = None, *, held_out: bool = False) -> dict[str, list[str]]:
    rows = slices(store, RUN, by, held_out=held_out)["rows"]
    return {row["value"]: [f"{cell['successes']}/{cell['episodes']}" for cell in row["cells"]] for row in rows}


def test_fields_whose_values_repeat_are_offered_and_the_one_that_decides_most_is_shown(store: ReplayStore) -> None:
    found = slices(store, RUN)
    # Each task has a `name` of its own, and all have one size, one environment and one stop reason.
    assert (found["fields"], found["by"], found["unknown"]) == (["hops", "info.level", "long"], "hops", 0)
    assert found["columns"][:2] == [(1, 4), (5, 8)] and found["columns"][-1] == (25, 26)
    assert cells(store) == {"2": ["16/16"] * 6 + ["8/8"], "3": ["0/16"] * 3 + ["6/16", "8/16", "8/16", "4/8"]}
    with pytest.raises(ReplayError, match="by must name a field that tells episodes apart, got 'size'. There is hops"):
        slices(store, RUN, "size")


@pytest.mark.parametrize("by", ["hops", "info.level", "long"])
def test_filter_of_a_value_finds_its_rows(store: ReplayStore, by: str) -> None:
    for row in slices(store, RUN, by)["rows"]:
        listed = questions.page(store, Query(RUN, [row["filter"]]), limit=200)["rows"]
        assert (len(listed), sum(each["success"] for each in listed)) == (row["episodes"], row["successes"])


@pytest.mark.parametrize(
    ("filter", "tasks"),
    [
        ("payload['hops'] == 2.0 and payload['size'] == 2.5", "ab"),
        ("2 < payload['hops'] <= 3", "cd"),
        ("payload['name'] in ['a', 'd', '\\x00', '\\ud83d']", "ad"),
        ("payload['info']['level'] != 'easy'", "bd"),
        ("payload['long'] == True and payload['$name'] is None", "ad"),
        ("payload['name'] > 1 or payload['hops']['level'] == 2", ""),
    ],
)
def test_filters_compare_fields_of_payloads(store: ReplayStore, filter: str, tasks: str) -> None:
    assert {row["task"] for row in questions.page(store, Query(RUN, [filter]), limit=500)["rows"]} == {*tasks}


def test_many_numbers_share_ranges(file_store: ReplayStore) -> None:
    tasks = [TaskRecord(f"{seed}", "chain", {"seed": seed}) for seed in range(40)]
    groups = [group(f"g{task.hash}", task=task.hash, success_rate=1.0) for task in tasks]
    file_store.append(tasks, groups, [])
    assert cells(file_store)["5\u20139"] == ["10/10"]
    assert [row["filter"] for row in slices(file_store, RUN)["rows"]][:2] == [
        "payload['seed'] < 5",
        "5 <= payload['seed'] < 10",
    ]


def test_held_out_tasks_have_kinds_and_those_that_were_lost_come_first(store: ReplayStore) -> None:
    assert cells(store, held_out=True) == {"2": ["1/2", "2/2", "2/2"], "3": ["1/2", "1/2", "0/2"]}
    listed = questions.held_out(store, RUN, 20, which=held_out_row(store, RUN, "hops", "3"))["rows"]
    assert [row["task"] for row in listed] == ["c", "d"]
    found = unsolved_held_out(store, RUN)
    assert (found["tasks"], found["lost"], found["never_solved"]) == (4, 1, 1)
    assert [(row["task"], row["lost"], row["prompt"]) for row in found["rows"]] == [
        ("c", True, "\u2026 c?"),
        ("d", False, "\u2026 d?"),
    ]
    assert found["rows"][0]["course"] == [[0, 1.0], [10, 1.0], [20, 0.0]]


def test_page_of_held_out_kinds_begins_with_the_latest_evaluation(store: ReplayStore) -> None:
    with served(create_app(OpenBuffer(store))) as server:
        words = server.words(f"/slices?run={RUN}&by=hops&of=held-out")
    # Of three hops no task of two was solved; earlier evaluations are no further trials.
    assert "3 0.0 % 2 0.0 % to 65.8 % 50.0 % 2 50.0 % 2 0.0 % 2" in words.replace("\u00a0", " ")


def test_prompts_of_a_list_begin_where_they_differ() -> None:
    asked = ["Be quick. Now play. Take the bug.", "Be quick. Now play. Drop it.", "Be quick. Sit.", "Be quick. Sit."]
    shown = [each["prompt"] for each in shorten_conversations([(Message("user", text),) for text in asked])]
    assert shown == ["\u2026 Take the bug.", "\u2026 Drop it.", "\u2026 Sit.", "\u2026 Sit."]
    asked = ["Be quick. Sit.", "Be quick. Go.", "Be slow. Sit.", "Be slow. Stay."]
    shown = [each["prompt"] for each in shorten_conversations([(Message("user", text),) for text in asked])]
    assert shown == ["Be quick. Sit.", "\u2026 Go.", "Be slow. Sit.", "\u2026 Stay."]


def test_forgotten_evaluation_takes_the_payloads_that_no_row_has(file_store: ReplayStore) -> None:
    file_store.append(TASKS, [group("g", task="a")], [trajectory("a0", group="g", task="a")])
    said = (Message("user", "?"),)
    for number, task in enumerate("ab"):
        episode = HeldOutEpisode(RUN, 0, number, task, "chain", "1", 0.0, False, "answered", None, 1, 0, said)
        file_store.keep_held_out(RUN, [episode], evaluations=1)
    file_store.forget(None, held_out=RUN, dry_run=False)
    assert sql(file_store, "select hash from tasks where payload = ?", REMOVED_TASK) == [("b",)]
