"""What rows of lists say of their conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from context.messages import Message, ToolCall
from replay import questions
from replay.questions.trajectory import MOST_SHORT, in_few_words
from tests.fakes.records import MESSAGES, group, new_store, sql, task, trajectory

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


def test_what_is_gone_or_damaged_is_not_known(tmp_path: Path) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    store.append([task()], [group()], [trajectory(name, slot=slot) for slot, name in enumerate("abc")])
    sql(store, "delete from messages where trajectory = 'b'")
    sql(store, "update messages set checksum = checksum + 1 where trajectory = 'c'")
    none = {"prompt": None, "answer": None}
    known = {"prompt": "Where is the key?", "answer": "in the drawer"}
    assert questions.excerpts(store, ["c", "nobody", "a", "b"]) == {"c": none, "nobody": none, "a": known, "b": none}
    store.close()
