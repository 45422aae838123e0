from dataclasses import replace

import pytest

from context.messages import Message, ToolCall
from replay import ReplayError, ReplayStore, questions
from replay.errors import InvalidRecord
from replay.records import HeldOutEpisode, ObservationRecord
from replay.storage.format.schema import trajectories
from tests.fakes.records import RUN, Fresh, a_run, draw, sql

SAID = (
    Message("user", "What is 6 times 7?"),
    Message("assistant", "", author="llm", tool_calls=(ToolCall("multiply", {"a": 6, "b": 7}),)),
    Message("tool", "42", author="env", name="multiply"),
    Message("assistant", "42", author="llm"),
)


def episode(at: int, iteration: int = 0, *, run: str = RUN, success: bool = True) -> HeldOutEpisode:
    tool, reward = "calculator.py:Calculator", float(success)
    return HeldOutEpisode(run, iteration, at, f"task-{at}", tool, "1", reward, success, "answered", None, 2, 1, SAID)


def kept(store: ReplayStore, run: str = RUN) -> list[tuple[int, int]]:
    return [(int(i), int(n)) for i, n in sql(store, "select iteration, number from held_out where run = ?", run)]


def test_evaluation_reads_back_as_it_was_put_a_page_at_a_time(store: ReplayStore) -> None:
    store.keep_held_out(RUN, [episode(0), episode(1, success=False), episode(2)], evaluations=2)
    store.keep_held_out(RUN, [episode(0, 4)], evaluations=2)
    found = questions.held_out(store, RUN, 0, limit=2)
    seen = found["evaluations"]
    assert seen == [{"iteration": 0, "episodes": 3, "successes": 2}, {"iteration": 4, "episodes": 1, "successes": 1}]
    assert [found["rows"][0][name] for name in ("prompt", "answer", "reward")] == ["What is 6 times 7?", "42", 1.0]
    assert [found["rows"][1][name] for name in ("number", "success", "num_tool_calls")] == [1, False, 1]
    last = questions.held_out(store, RUN, 0, after=found["next"], limit=2)
    assert ([row["number"] for row in last["rows"]], last["next"]) == ([2], None)
    assert questions.held_out(store, RUN)["iteration"] == 4
    assert [row["number"] for row in questions.held_out(store, RUN, 0, success=False)["rows"]] == [1]
    on_task = questions.held_out_task(store, RUN, "task-0")
    assert [each["iteration"] for each in on_task["episodes"]] == [0, 4]
    call = on_task["episodes"][0]["messages"][1]["tool_calls"][0]
    assert call == {"name": "multiply", "arguments": {"a": 6, "b": 7}, "id": None}
    for ask, message in (
        (lambda: questions.held_out(store, RUN, 3), r"evaluation's episodes are kept \(0, 4\), got 3"),
        (lambda: questions.held_out_task(store, RUN, "x"), "task must be the beginning of one held-out task's hash"),
    ):
        with pytest.raises(ReplayError, match=message):
            ask()


def test_newest_evaluations_of_a_run_are_kept_and_a_resume_takes_back_later_ones(store: ReplayStore) -> None:
    store.add_run(a_run("run-2"))
    store.keep_held_out("run-2", [episode(0, run="run-2")], evaluations=2)
    for iteration in (0, 4, 8):
        store.keep_held_out(RUN, [episode(0, iteration)], evaluations=2)
    assert kept(store) == [(4, 0), (8, 0)]
    store.resume(RUN, 4)
    assert (kept(store), kept(store, "run-2")) == ([(4, 0)], [(0, 0)])
    store.keep_held_out(RUN, [], evaluations=0)
    assert kept(store) == []
    with pytest.raises(InvalidRecord, match="reward must"):
        store.keep_held_out(RUN, [replace(episode(0), reward=float("nan"))], evaluations=1)


def test_no_count_and_no_draw_knows_of_them(store: ReplayStore) -> None:
    Fresh(1).append_to(store)

    def seen() -> tuple[object, ...]:
        summary = questions.summary(store)
        del summary["bytes"]
        drawn = [row.trajectory.id for row in draw(store, 2, 3)]
        store.resume(RUN, 1)  # releases what was reserved
        return summary, questions.page(store)["rows"], questions.runs(store), drawn

    before = seen()
    store.keep_held_out(RUN, [episode(number, 1) for number in range(9)], evaluations=1)
    assert seen() == before


def test_damaged_conversation_is_none_and_the_rest_is_read(store: ReplayStore) -> None:
    store.keep_held_out(RUN, [episode(0), episode(1)], evaluations=1)
    sql(store, "update held_out set checksum = checksum + 1 where number = 0")
    damaged, whole = questions.held_out(store, RUN)["rows"]
    assert (damaged["prompt"], damaged["answer"], whole["answer"]) == (None, None, "42")
    assert questions.held_out_task(store, RUN, "task-0")["episodes"][0]["messages"] is None


def test_answers_come_back_by_task_and_environment_and_are_forgotten_with_its_rows(store: ReplayStore) -> None:
    Fresh(1).append_to(store)
    first = ObservationRecord("call-0", "task-1", "tools-1", None, "look", {"key": "ü", "n": 0}, "a\nb")
    second, other = replace(first, id="call-1", parent="call-0"), replace(first, id="call-2", environment="tools-2")
    store.remember([second, first, other])
    assert sorted(store.remembered("tools-1", ["task-1"]), key=lambda record: record.id) == [first, second]
    assert store.remembered("tools-1", ["another"]) == []
    assert len(store.remembered("tools-2", ["task-1"])) == 1
    store.forget(trajectories.c.iteration == 1, dry_run=False)
    assert store.remembered("tools-1", ["task-1"]) == []
