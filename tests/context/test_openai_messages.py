from typing import Any

import pytest

from context import RenderError, read_message
from context.openai_messages import check_tools

USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("role", "content", "text"),
    [
        ("user", [{"type": "text", "text": "a"}, "b", {"text": "c"}, {"type": "input_text", "text": "d"}], "abcd"),
        ("user", [], ""),
        ("tool", 12, "12"),
        ("tool", None, ""),
        ("tool", {"a": [1, "é"]}, '{"a": [1, "é"]}'),
        ("tool", [1, 2], "[1, 2]"),
        ("tool", [{"id": 3}], '[{"id": 3}]'),
        ("tool", [{"type": "text", "text": "a"}], "a"),
    ],
)
def test_text_parts_are_joined_and_what_a_tool_returned_is_its_json(role: str, content: Any, text: str) -> None:
    assert read_message(0, {"role": role, "content": content}).content == text


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "video"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_images_audio_and_video_are_refused_by_name(role: str, kind: str) -> None:
    row = {"role": role, "content": [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "x"}}]}
    with pytest.raises(RenderError, match=rf"messages\[2\]\.content\[1\] must be a text part, got .*'type': '{kind}'"):
        read_message(2, row)


@pytest.mark.parametrize(
    "arguments, read", [('{"key": "a"}', {"key": "a"}), ({"key": "a"}, {"key": "a"}), (None, {}), ("", {}), ({}, {})]
)
def test_arguments_are_an_object_or_its_text_or_left_out(arguments: Any, read: dict[str, Any]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": arguments}}
    (found,) = read_message(0, {"role": "assistant", "content": None, "tool_calls": [call]}).tool_calls
    assert (found.name, found.arguments, found.id) == ("lookup", read, "c1")


def calling(**call: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f"} | call}]}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"role": 3}, r"messages\[0\] must be an object with a role"),
        ({"role": "user", "content": {"a": 1}}, r"messages\[0\]\.content must be text or a list of text parts"),
        ({"role": "user", "content": [None]}, r"messages\[0\]\.content\[0\] must be a text part"),
        ({"role": "tool", "content": float("nan")}, r"messages\[0\]\.content must be text or a JSON value"),
        ({**USER, "author": 3}, r"messages\[0\]\.author must be text"),
        ({**USER, "reasoning_content": {}}, r"messages\[0\]\.reasoning_content must be text"),
        ({**USER, "tool_calls": {}}, r"messages\[0\]\.tool_calls must be a list"),
        (calling(name=3), r"messages\[0\]\.tool_calls must hold the name of a function"),
        (calling(arguments=[1]), r"messages\[0\]\.tool_calls must hold an object of arguments"),
        (calling(arguments='{"a": 1, "a": 2}'), "must hold an object of arguments.* the same key twice"),
    ],
)
def test_what_is_no_message_is_refused_in_one_line(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RenderError, match=complaint) as refusal:
        read_message(0, row)
    assert "\n" not in str(refusal.value)


def test_tool_without_a_name_is_refused() -> None:
    with pytest.raises(RenderError, match=r"tools\[0\] must be"):
        check_tools([{"function": {"name": 3}}])
