"""Twelve conversations as agents have them, written down: what is said, what is called, what comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from context import Message, ToolCall

LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a record by its key.",
        "parameters": {
            "type": "object",
            "properties": {
                "key": {"type": "string", "description": "Name of the record."},
                "limit": {"type": "integer", "description": "How many lines.", "default": 3},
            },
            "required": ["key"],
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "One of them."},
                "b": {"type": "number", "description": "The other."},
            },
            "required": ["a", "b"],
        },
    },
}


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


def _plain() -> ScriptedConversation:
    return ScriptedConversation(
        "plain",
        (_user("Hello there, how are you?"),),
        (
            ScriptedTurn(_said("Fine, thanks. What can I do?"), (_user("Tell me the code of pearl."),)),
            ScriptedTurn(_said("The code is 78."), (_user("Thanks!"),)),
        ),
    )


def _with_system() -> ScriptedConversation:
    return ScriptedConversation(
        "system",
        (_system("You are a careful agent. Answer in one line."), _user("What is the code of pearl?")),
        (
            ScriptedTurn(_said("It is 78."), (_user("And the next one?"),)),
            ScriptedTurn(_said("It is 79."), (_user("Are you sure?"),)),
        ),
    )


def _few_shot() -> ScriptedConversation:
    return ScriptedConversation(
        "few_shot",
        (
            _system("Give the capital."),
            _user("France?"),
            Message("assistant", "Paris.", "initialization"),
            _user("Italy?"),
            Message("assistant", "Rome.", "initialization"),
            _user("Spain?"),
        ),
        (ScriptedTurn(_said("Madrid."), (_user("Poland?"),)), ScriptedTurn(_said("Warsaw."), (_user("Peru?"),))),
    )


def _one_tool() -> ScriptedConversation:
    return ScriptedConversation(
        "tools",
        (_system("Use the tools."), _user("What is the code of pearl?")),
        (
            _answered(_call(1, key="pearl"), "See coral."),
            _answered(_call(2, key="coral", limit=2), "The code is 78."),
            ScriptedTurn(_said("The code is 78."), (_user("And of arrow?"),)),
            _answered(_call(3, key="arrow"), "No such record."),
        ),
        (LOOKUP,),
    )


def _parallel() -> ScriptedConversation:
    first, second = _call(1, key="pearl"), _call(2, "add", a=1, b=2.5)
    return ScriptedConversation(
        "parallel",
        (_user("Look up pearl, and add 1 and 2.5."),),
        (
            ScriptedTurn(_called(first, second), (_result(first, "78"), _result(second, "3.5"))),
            ScriptedTurn(_said("78 and 3.5."), (_user("Thanks."),)),
        ),
        (LOOKUP, ADD),
    )


def _structured() -> ScriptedConversation:
    return ScriptedConversation(
        "structured",
        (_user("How many are there?"),),
        (
            _answered(_call(1, key="count"), "12"),
            _answered(_call(2, key="rows"), json.dumps({"rows": [{"key": "a", "n": 1}, {"key": "b", "n": None}]})),
            _answered(_call(3, key="none"), "null"),
            ScriptedTurn(_said("Twelve."), (_user("12"),)),
        ),
        (LOOKUP,),
    )


def _thinking() -> ScriptedConversation:
    return ScriptedConversation(
        "thinking",
        (_user("What is the code of pearl?"),),
        (
            _answered(_call(1, key="pearl"), "See coral.", thought="I should look it up."),
            _answered(_call(2, key="coral"), "78", thought="Now coral.\nThen I know."),
            ScriptedTurn(_said("It is 78.", thought="The record says so."), (_user("And the next one?"),)),
            ScriptedTurn(_said("It is 79.", thought="One more."), (_user("Thanks."),)),
        ),
        (LOOKUP,),
    )


def _text_beside_a_call() -> ScriptedConversation:
    return ScriptedConversation(
        "text_beside_call",
        (_system("Use the tools."), _user("What is the code of pearl?")),
        (
            _answered(_call(1, key="pearl"), "See coral.", text="I will look it up."),
            _answered(_call(2, key="coral"), "78", text="One moment."),
            ScriptedTurn(_said("It is 78."), (_user("Good."),)),
        ),
        (LOOKUP,),
    )


def _letters() -> ScriptedConversation:
    return ScriptedConversation(
        "letters",
        (_system("  Answer in 中文 or 日本語 😀\n"), _user("\n今天的代码是什么？ Ωμέγα café\u0301 \u200bﬁne\t ")),
        (
            ScriptedTurn(_said("是 78。😀\n\n好的"), (_user("  two spaces\n\n\nthree lines  "),)),
            _answered(_call(1, key='真珠 "pearl"\n\\'), '  {"值": "é😀"}\n'),
            ScriptedTurn(_said("¡Sí! 🇪🇺"), (_user("שלום 한국어"),)),
        ),
        (LOOKUP,),
    )


def _empty() -> ScriptedConversation:
    return ScriptedConversation(
        "empty",
        (_system(""), _user("")),
        (
            ScriptedTurn(_said("Did you say something?"), (_user(""),)),
            _answered(_call(1, key=""), ""),
            ScriptedTurn(_said("Nothing."), (_user(" "),)),
        ),
        (LOOKUP,),
    )


def _empty_replies() -> ScriptedConversation:
    """Nothing said, with no thought and with an empty one, before a user's message and before a result."""
    return ScriptedConversation(
        "empty_replies",
        (_user("Say nothing."),),
        (
            ScriptedTurn(_said(""), (_user("Again."),)),
            ScriptedTurn(_said("", thought=""), (_user("And again."),)),
            ScriptedTurn(_said("", thought="Nothing?"), (_user("Now look it up."),)),
            _answered(_call(1, key="pearl"), "78", thought=""),
            ScriptedTurn(_said("", thought=""), (_user("Thanks."),)),
        ),
        (LOOKUP,),
    )


def _many_turns() -> ScriptedConversation:
    turns = [
        _answered(_call(number, key=f"record {number}"), f"Record {number} says: see record {number + 1}.\n" * 4)
        for number in range(8)
    ]
    return ScriptedConversation(
        "many_turns",
        (_system("Follow the records."), _user("Begin at record 0.")),
        (*turns, ScriptedTurn(_said("Done."), (_user("Thanks."),))),
        (LOOKUP,),
    )


def _think_in_content() -> ScriptedConversation:
    return ScriptedConversation(
        "think_in_content",
        (
            _user("Two and two?"),
            Message("assistant", "<think>\nEasy.\n</think>\n\nFour.", "initialization"),
            _user("And three and three?"),
        ),
        (
            ScriptedTurn(_said("Six.", thought="Three twice."), (_user("And four and four?"),)),
            ScriptedTurn(_said("Eight.", thought="Four twice."), (_user("Good."),)),
        ),
    )


def scripted_conversations() -> tuple[ScriptedConversation, ...]:
    return (
        _plain(),
        _with_system(),
        _few_shot(),
        _one_tool(),
        _parallel(),
        _structured(),
        _thinking(),
        _text_beside_a_call(),
        _letters(),
        _empty(),
        _empty_replies(),
        _many_turns(),
        _think_in_content(),
    )
