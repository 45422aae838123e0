"""`replay held-out` in a terminal."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from context.messages import Message, ToolCall
from tests.fakes.records import RUN, new_store
from tests.fakes.replay_command import ask
from tests.replay.storage.collecting.test_held_out_rows import episode

THOUGHT = (
    Message("user", "What is 6 times 7?"),
    Message(
        "assistant", "", "llm", tool_calls=(ToolCall("multiply", {"a": 6, "b": float("nan")}),), reasoning="7 sixes"
    ),
    Message("tool", "\x1b[31mno number", "env", name="multiply"),
    Message("assistant", "42", "llm"),
)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("held-out") / "replay.sqlite"
    with closing(new_store(path)) as store:
        store.keep_held_out(RUN, [episode(0), episode(1, success=False)], evaluations=9)
        store.keep_held_out(RUN, [replace(episode(0, 4), messages=THOUGHT)], evaluations=9)
    return path


def test_newest_evaluation_is_listed_and_others_are_named(database: Path) -> None:
    text = ask("held-out", str(database)).output
    assert text.startswith(
        "evaluation after iteration 4: 1 episode, 100.0 % successful\nothers: --iteration 0 (50.0 %)\n"
    )
    failed = json.loads(ask("held-out", str(database), "--iteration", "0", "--failed", "--json").output)
    assert [row["number"] for row in failed["rows"]] == [1]


def test_a_page_says_where_the_next_one_begins(database: Path) -> None:
    found = ask("held-out", str(database), "--iteration", "0", "--limit", "1")
    assert found.stderr == "further episodes: add --after 0\n"


def test_what_was_said_on_a_task_is_told_with_thinking_and_calls(database: Path) -> None:
    text = ask("held-out", str(database), "--task", "task-0").output
    assert "after iteration 0: reward 1, success, answered\nuser: What is 6 times 7?\n" in text
    assert 'assistant: (thinking) 7 sixes\n    calls multiply(a=6, b="nan")\n' in text
    assert "tool multiply: " in text
    assert "\x1b" not in text


def test_answer_for_programs_is_json_whatever_a_model_wrote(database: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = ask("held-out", str(database), "--task", "task-0", "--json").output
    call = json.loads(text, parse_constant=refuse)["episodes"][1]["messages"][1]["tool_calls"][0]
    assert (call["name"], call["arguments"]) == ("multiply", {"a": 6, "b": "nan"})
