"""Twelve conversations as agents have them, written down: what is said, what is called, what comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from context import Message, ToolCall


def _tool(name: str, description: str, required: Sequence[str], **properties: tuple[str, str]) -> dict[str, Any]:
    described = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {"type": "object", "properties": described, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_KEY, _LIMIT = ("string", "Name of the record."), ("integer", "How many lines.")
LOOKUP = _tool("lookup", "Look up a record by its key.", ["key"], key=_KEY, limit=_LIMIT)
LOOKUP["function"]["parameters"]["properties"]["limit"]["default"] = 3
ADD = _tool("add", "Add two numbers.", ["a", "b"], a=("number", "One of them."), b=("number", "The other."))


@dataclass(frozen=True)
class ScriptedTurn:
    reply: Message
    given: tuple[Message, ...]
    """What comes back: results of tools, or the next question."""


@dataclass(frozen=True)
class ScriptedConversation:
    name: str
    opening: tuple[Message, ...]
    turns: tuple[ScriptedTurn, ...]
    tools: Sequence[Mapping[str, Any]] = ()


def _user(text: str) -> Message:
    return Message("user", text)


def _system(text: str) -> Message:
    return Message("system", text, "initialization")


def _said(text: str, *, thought: str | None = None) -> Message:
    return Message("assistant", text, "llm", reasoning=thought)


def _called(*calls: ToolCall, text: str = "", thought: str | None = None) -> Message:
    return Message("assistant", text, "llm", calls, reasoning=thought)


def _call(number: int, name: str = "lookup", **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, f"call{number:05d}")


def _result(call: ToolCall, content: str) -> Message:
    return Message("tool", content, "env", name=call.name, tool_call_id=call.id)


def _answered(call: ToolCall, content: str, *, text: str = "", thought: str | None = None) -> ScriptedTurn:
    return ScriptedTurn(_called(call, text=text, thought=thought), (_result(call, content),))


def _asked(text: str, question: str, *, thought: str | None = None) -> ScriptedTurn:
    """An answer, and what the user says to it."""
    return ScriptedTurn(_said(text, thought=thought), (_user(question),))


def _parallel() -> ScriptedTurn:
    first, second = _call(1, key="pearl"), _call(2, "add", a=1, b=2.5)
    return ScriptedTurn(_called(first, second), (_result(first, "78"), _result(second, "3.5")))


_WHICH = _user("What is the code of pearl?")
_MANY = [
    _answered(_call(number, key=f"record {number}"), f"Record {number} says: see record {number + 1}.\n" * 4)
    for number in range(8)
]
_ROWS = json.dumps({"rows": [{"key": "a", "n": 1}, {"key": "b", "n": None}]})
_CONVERSATIONS: dict[str, tuple[Sequence[Message], Sequence[ScriptedTurn], Sequence[Mapping[str, Any]]]] = {
    "plain": (
        [_user("Hello there, how are you?")],
        [_asked("Fine, thanks. What can I do?", "Tell me the code of pearl."), _asked("The code is 78.", "Thanks!")],
        (),
    ),
    "system": (
        [_system("You are a careful agent. Answer in one line."), _WHICH],
        [_asked("It is 78.", "And the next one?"), _asked("It is 79.", "Are you sure?")],
        (),
    ),
    "few_shot": (
        [
            *(_system("Give the capital."), _user("France?"), Message("assistant", "Paris.", "initialization")),
            *(_user("Italy?"), Message("assistant", "Rome.", "initialization"), _user("Spain?")),
        ],
        [_asked("Madrid.", "Poland?"), _asked("Warsaw.", "Peru?")],
        (),
    ),
    "tools": (
        [_system("Use the tools."), _WHICH],
        [
            _answered(_call(1, key="pearl"), "See coral."),
            _answered(_call(2, key="coral", limit=2), "The code is 78."),
            _asked("The code is 78.", "And of arrow?"),
            _answered(_call(3, key="arrow"), "No such record."),
        ],
        (LOOKUP,),
    ),
    "parallel": (
        [_user("Look up pearl, and add 1 and 2.5.")],
        [_parallel(), _asked("78 and 3.5.", "Thanks.")],
        (LOOKUP, ADD),
    ),
    "structured": (
        [_user("How many are there?")],
        [
            _answered(_call(1, key="count"), "12"),
            _answered(_call(2, key="rows"), _ROWS),
            _answered(_call(3, key="none"), "null"),
            _asked("Twelve.", "12"),
        ],
        (LOOKUP,),
    ),
    "thinking": (
        [_WHICH],
        [
            _answered(_call(1, key="pearl"), "See coral.", thought="I should look it up."),
            _answered(_call(2, key="coral"), "78", thought="Now coral.\nThen I know."),
            _asked("It is 78.", "And the next one?", thought="The record says so."),
            _asked("It is 79.", "Thanks.", thought="One more."),
        ],
        (LOOKUP,),
    ),
    "text_beside_call": (
        [_system("Use the tools."), _WHICH],
        [
            _answered(_call(1, key="pearl"), "See coral.", text="I will look it up."),
            _answered(_call(2, key="coral"), "78", text="One moment."),
            _asked("It is 78.", "Good."),
        ],
        (LOOKUP,),
    ),
    "letters": (
        [_system("  Answer in 中文 or 日本語 😀\n"), _user("\n今天的代码是什么？ Ωμέγα café\u0301 \u200bﬁne\t ")],
        [
            _asked("是 78。😀\n\n好的", "  two spaces\n\n\nthree lines  "),
            _answered(_call(1, key='真珠 "pearl"\n\\'), '  {"值": "é😀"}\n'),
            _asked("¡Sí! 🇪🇺", "שלום 한국어"),
        ],
        (LOOKUP,),
    ),
    "empty": (
        [_system(""), _user("")],
        [_asked("Did you say something?", ""), _answered(_call(1, key=""), ""), _asked("Nothing.", " ")],
        (LOOKUP,),
    ),
    # Nothing said, with no thought and with an empty one, before a user's message and before a result.
    "empty_replies": (
        [_user("Say nothing.")],
        [
            _asked("", "Again."),
            _asked("", "And again.", thought=""),
            _asked("", "Now look it up.", thought="Nothing?"),
            _answered(_call(1, key="pearl"), "78", thought=""),
            _asked("", "Thanks.", thought=""),
        ],
        (LOOKUP,),
    ),
    "many_turns": (
        [_system("Follow the records."), _user("Begin at record 0.")],
        [*_MANY, _asked("Done.", "Thanks.")],
        (LOOKUP,),
    ),
    "think_in_content": (
        [
            _user("Two and two?"),
            Message("assistant", "<think>\nEasy.\n</think>\n\nFour.", "initialization"),
            _user("And three and three?"),
        ],
        [
            _asked("Six.", "And four and four?", thought="Three twice."),
            _asked("Eight.", "Good.", thought="Four twice."),
        ],
        (),
    ),
}


def scripted_conversations() -> tuple[ScriptedConversation, ...]:
    return tuple(
        ScriptedConversation(name, tuple(opening), tuple(turns), tools)
        for name, (opening, turns, tools) in _CONVERSATIONS.items()
    )
