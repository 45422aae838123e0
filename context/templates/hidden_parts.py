"""What a chat template leaves out (tools, messages of a role, calls, thoughts): a sentence for each, with a remedy."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from context.messages import Message, ToolCall, to_template
from context.parse.choose import written_calls
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.rendering.contents import contents, first_place

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
    """Why a prompt does not show each of these messages; None: it does."""
    marks = {n: f"zq{n:04}zq" for n, row in enumerate(messages) if row.content.strip() and not row.tool_calls}
    rows = [to_template(row) | ({"content": marks[n]} if n in marks else {}) for n, row in enumerate(messages)]
    try:
        text = template.render(rows, tools=tools, generation_prompt=True)
    except RenderError as error:
        return str(error)
    hidden = next((number for number, shown in marks.items() if shown not in text.lower()), None)
    return None if hidden is None else left_out(hidden, messages[hidden].role)


def hidden_result(template: ChatTemplate, opening: Sequence[Message], tools: _Tools) -> str | None:
    """Why a prompt does not show the result of a call; None: it does."""
    return hidden_message(template, (*opening, *_ANSWERED_CALL), tools)


def left_out(number: int, role: str) -> str:
    """The sentence about a message that a template does not show."""
    return f"chat template must render every message, got one that leaves out messages[{number}] (role {role}). " + (
        _REMEDY if role == "tool" else f"{_OTHER}, or give another role."
    )


def hidden_tools(
    template: ChatTemplate, tools: _Tools, opening: Sequence[Message], *, described: bool = False
) -> str | None:
    """Why a prompt does not show each tool by its name; None: it does. `described`: messages may name them, too."""
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
    """Why a reply is shown without its calls; None: it is not."""
    return None if written_calls(template) else _HIDDEN_CALLS


def hidden_text(message: Message, written: str) -> str | None:
    """Why a reply as it is `written` is less than what was said; None: it is all there."""
    said = [*(call.name for call in message.tool_calls), *(found.text for found in contents(message))]
    missing = next((text for text in said if first_place(written, text) is None), None)
    if missing is None:
        return None
    if missing == message.reasoning:
        return HIDDEN_THOUGHTS
    part = "its text" if missing == message.content else repr(missing[:60])
    return f"chat template must show all of a learned reply, got one that leaves out {part}. {_REMEDY}"
