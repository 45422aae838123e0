"""The texts of messages, as templates take them."""

from __future__ import annotations

import pytest

from context import Message
from context.templates.rendering.contents import with_thought


@pytest.mark.parametrize(
    ("content", "reasoning", "rest"),
    [
        ("<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("<think></think>Yes.", "", "Yes."),
        ("\n<think>a\nb</think>", "a\nb", ""),
        ("Yes. <think>hm</think>", None, "Yes. <think>hm</think>"),
        ("<think>hm", None, "<think>hm"),
    ],
)
def test_thinking_in_what_an_assistant_says_is_read_apart(content: str, reasoning: str | None, rest: str) -> None:
    message = with_thought(Message("assistant", content))
    assert (message.reasoning, message.content) == (reasoning, rest)


def test_thinking_is_left_where_there_is_some_or_another_speaks() -> None:
    said = "<think>a</think>b"
    named = with_thought(Message("assistant", said, reasoning="c"))
    assert (named.reasoning, named.content) == ("c", said)
    assert with_thought(Message("user", said)).content == said
