"""Rows as tasks without a class."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from agentloop.environments import load_environment
from agentloop.environments.row_environment import RowEnvironment
from agentloop.errors import UserError
from context.messages import Message

ROW = {"prompt": "How much is 1 + 1?", "answer": "2"}


def test_row_is_the_task_and_its_prompt_the_users_message() -> None:
    task = RowEnvironment().task_from_row(ROW)
    assert task.messages() == (Message("user", "How much is 1 + 1?", author="user"),)
    assert task.payload == ROW


def test_column_and_system_message_are_options() -> None:
    factory = load_environment("rows", {"prompt": "question", "system": "Be brief."}, row={"question": "Why?"})
    assert factory.example is not None
    shown = [(message.role, message.content) for message in factory.example.messages()]
    assert shown == [("system", "Be brief."), ("user", "Why?")]


def test_prompt_may_be_messages() -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?", "name": None}]
    assert [message.role for message in RowEnvironment().task_from_row({"prompt": said}).messages()] == [
        "system",
        "user",
    ]


def test_dates_and_bytes_of_a_row_are_texts() -> None:
    task = RowEnvironment().task_from_row({"prompt": "When?", "on": datetime.date(2026, 1, 31), "key": b"\x01\xff"})
    assert task.payload == {"prompt": "When?", "on": "2026-01-31", "key": "01ff"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"promt": "Why?", "answer": "2"},
            "environment.options.prompt must name a column that every row has, got 'prompt' for one of tasks.data with "
            "'promt', 'answer'. Did you mean promt?",
        ),
        ({"prompt": 7}, "must be a text or a list of messages {'role': ..., 'content': ...}, got int in row 1."),
        ({"prompt": []}, "must be a text or a list of messages {'role': ..., 'content': ...}, got list in row 1."),
        ({"prompt": [{"role": "tool", "content": "2"}]}, "with one of the roles system, user, assistant, got {'role'"),
        ({"prompt": [{"role": "user", "content": "x", "name": "Emil"}]}, "and nothing else, got name in row 1."),
    ],
)
def test_row_that_can_not_be_shown_is_refused_by_name(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_environment("rows", {}, row=row)
    assert message in str(caught.value)
