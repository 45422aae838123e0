"""Finds what a chat template leaves out: tools, messages of a role, calls, thoughts.

Each finding is a sentence with its remedy.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from context.messages import Message, ToolCall, changed, to_template
from context.parse import Reply
from context.parse.choose import written_calls
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.rendering.contents import contents
from context.wording import storable

_Tools = Sequence[Mapping[str, Any]]
_OTHER = "Set context.template: hermes (or llama3, mistral, a .jinja file)"
_REMEDY = f"{_OTHER}, or context.allow_hidden_tools: true to go on without."
_HIDDEN_CALLS = f"chat template must show every call, got one that leaves calls out. {_REMEDY}"
HIDDEN_THOUGHTS = (
    f"chat template must show every thought of a learned reply, got one that leaves thoughts out. {_REMEDY}"
)
_ANSWERED_CALL = (
    Message("assistant", "", tool_calls=(ToolCall("lookup", {"key": "x"}, "call00001"),)),
    Message("tool", "x", "env", name="lookup", tool_call_id="call00001"),
)


def hidden_message(template: ChatTemplate, messages: Sequence[Message], tools: _Tools) -> str | None:
    """Why a prompt does not show each of these messages. None: it shows them."""
    marks = {n: f"zq{n:04}zq" for n, row in enumerate(messages) if row.content.strip() and not row.tool_calls}
    rows = [to_template(row) | ({"content": marks[n]} if n in marks else {}) for n, row in enumerate(messages)]
    try:
        text = template.render(rows, tools=tools, generation_prompt=True)
    except RenderError as error:
        return str(error)
    hidden = next((number for number, shown in marks.items() if shown not in text.lower()), None)
    return None if hidden is None else left_out(hidden, messages[hidden].role)


def hidden_result(template: ChatTemplate, opening: Sequence[Message], tools: _Tools) -> str | None:
    """Why a prompt does not show the result of a call. None: it shows the result."""
    return hidden_message(template, (*opening, *_ANSWERED_CALL), tools)


def left_out(number: int, role: str) -> str:
    """The sentence about a message that a template does not show."""
    return f"chat template must render every message, got one that leaves out messages[{number}] (role {role}). " + (
        _REMEDY if role == "tool" else f"{_OTHER}, or give another role."
    )


def hidden_tools(
    template: ChatTemplate, tools: _Tools, opening: Sequence[Message], *, described: bool = False
) -> str | None:
    """Why a prompt does not show each tool by its name. None: it does. `described`: messages may name them instead."""
    rows = [to_template(message) for message in opening]
    prompt = template.render(rows, tools=tools, generation_prompt=True)
    try:
        without = template.render(rows, generation_prompt=True)
    except RenderError:  # a template for conversations with tools alone
        without = ""
    said = " ".join(content.text for message in opening for content in contents(message)) if described else ""
    names = [str(tool.get("function", tool)["name"]) for tool in tools]
    hidden = [name for name in names if prompt.count(name) <= without.count(name)]
    hidden = [name for name in hidden if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", said)]
    if not hidden:
        return None
    roles = ", ".join(message.role for message in opening)
    return (
        f"chat template must show every tool, got one that leaves {', '.join(hidden)} out of a prompt with the roles "
        f"[{roles}]. {_REMEDY}"
    )


def hidden_calls(template: ChatTemplate) -> str | None:
    """Why replies are shown without their calls. None: they are shown with them."""
    return None if written_calls(template) else _HIDDEN_CALLS


def unlike(message: Message, read: Reply, *, opened: str) -> str | None:
    """Say how the reply that a parser `read` differs from the intended message. None: they are equal.

    `opened` is the end of the prompt, if it opens a thought.
    """
    found = read.message
    if message.reasoning and _bare(message.reasoning) not in f"{found.reasoning}{found.content}":
        return HIDDEN_THOUGHTS
    if read.outcome == "malformed" and opened and not message.reasoning:
        return (
            f"chat template must close the thought that its prompt opens ({opened!r}), got one that does not before "
            "this reply. Give the reply a thought, or set context.template_args (enable_thinking: false) or "
            "context.template: hermes."
        )
    if read.outcome not in ("final", "tool_calls"):
        said = f"chat template must write a learned reply so that it can be read, got one where {read.problem}"
        return f"{said}. {_REMEDY}"
    if _bare(found.reasoning) != _bare(message.reasoning):
        return HIDDEN_THOUGHTS
    if message.tool_calls and not found.tool_calls:
        return _HIDDEN_CALLS
    parts = [*zip_longest(map(_call, message.tool_calls), map(_call, found.tool_calls))]
    parts.append((_bare(message.content), _bare(found.content)))
    differing = next(((said, shown) for said, shown in parts if said != shown), None)
    if differing is None:
        return None
    said, shown = (repr(part or "")[:80] for part in differing)
    return (
        f"chat template must show all of a learned reply, got one whose {said} is read as {shown}. {_OTHER}, "
        "context.parser, or context.allow_hidden_tools: true to go on without."
    )


def _bare(text: str | None) -> str:
    return storable(text or "").strip()


def _call(call: ToolCall) -> tuple[str, Any]:
    return call.name, changed(call.arguments, storable, storable)
