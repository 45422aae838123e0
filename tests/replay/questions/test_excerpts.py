"""What rows of lists say of their conversations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from context.messages import Message, ToolCall
from replay import questions
from replay.questions.trajectory import MOST_SHORT, in_few_words
from tests.fakes.records import MESSAGES, group, new_store, sql, task, trajectory
from tests.fakes.replay_command import ask

CALL = ToolCall("lookup", {"key": "é1"}, "call-0")


@pytest.mark.parametrize(
    ("conversation", "prompt", "answer"),
    [
        (MESSAGES, "Where is the key?", "in the drawer"),
        ((Message("user", " two\n\n lines "), Message("assistant", "", tool_calls=(CALL,))), "two lines",
         'lookup({"key": "é1"})'),
        ((Message("user", "q"), Message("assistant", " ", reasoning="hm")), "q", "hm"),
        ((Message("system", "rules"), Message("assistant", "yes")), "rules", "yes"),
        ((Message("user", "q"), Message("tool", "done", author="env")), "q", None),
        # An earlier conversation that the task brings along is part of what was asked.
        ((Message("user", "old"), Message("assistant", "older", author="history"), Message("user", "new"),
          Message("assistant", "newer", author="llm")), "new", "newer"),
        ((Message("user", "q"), Message("assistant", "a"), Message("user", "go on"), Message("assistant", "b")), "q",
         "b"),
        ((Message("assistant", "first"),), None, "first"),
        ((), None, None),
        ((Message("user", "ab " * 1000), Message("assistant", "x" * 201)), ("ab " * 67)[:MOST_SHORT] + "...",
         "x" * MOST_SHORT + "..."),
    ],
)  # fmt: skip
def test_prompt_is_the_last_question_before_the_first_reply_and_answer_the_last_reply(
    conversation: Sequence[Message], prompt: str | None, answer: str | None
) -> None:
    assert in_few_words(conversation) == {"prompt": prompt, "answer": answer}


def test_ls_prints_both_and_how_far_a_row_had_drifted(tmp_path: Path) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    said = (Message("user", f"Where{'e' * 60} is it?"), Message("assistant", "in\x1b the drawer"))
    rows = [trajectory("a", messages=said), *(trajectory(name, slot=slot) for slot, name in enumerate("bcd", 1))]
    store.append([task()], [group()], rows)
    sql(store, "delete from messages where trajectory = 'c'")
    sql(store, "update messages set checksum = checksum + 1 where trajectory = 'd'")
    none = {"prompt": None, "answer": None}  # what is gone or damaged is not known
    assert [questions.excerpts(store, [id])[id] for id in ("c", "d", "nobody")] == [none] * 3
    sql(
        store,
        "insert into draws (run, iteration, slot, trajectory, stream, state, drift_mean, drift_max) "
        "values ('run-1', 2, 0, 'a', 'replay', 'committed', 1.25, 3.5)",
    )
    store.close()
    printed = ask("ls", tmp_path / "replay.sqlite", "--ascending").stdout.splitlines()
    titles, first, second, *_ = (re.split("  +", line) for line in printed)
    assert titles[-5:] == ["drift", "most", "state", "prompt", "last answer"]
    assert first[-5:] == ["1.250", "3.50", "eligible", f"'Where{'e' * 43}...'", r"'in\x1b the drawer'"]
    assert second[-5:] == ["-", "-", "eligible", "'Where is the key?'", "'in the drawer'"]
