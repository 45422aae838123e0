"""The forms in which chat templates take messages: contents as text or parts, arguments as objects or text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Row = Mapping[str, Any]
# `message.thinking`, `message["thinking"]`: what GPT-OSS and the first LFM2.5 call `reasoning_content`.
_THINKING_FIELD = re.compile(r"""message(\.|\[["'])thinking\b""")
LOOKUP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a record.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "Which record."}},
            "required": ["key"],
        },
    },
}
_ID = "call00001"  # nine letters and digits, as Mistral's templates demand
_ASKED: Row = {"role": "user", "content": "pearl-0417"}
CALLED: tuple[Row, ...] = (
    _ASKED,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": _ID, "function": {"name": "lookup", "arguments": {}}}],
    },
    {"role": "tool", "name": "lookup", "content": "x", "tool_call_id": _ID},
)


@dataclass(frozen=True)
class RowForms:
    """What a template wants otherwise than OpenAI's own messages."""

    thinking: bool = False
    """`reasoning_content` under the name `thinking`."""
    json_arguments: bool = False
    """Arguments as JSON text: DeepSeek-V3 pastes them as they are."""
    parts: bool = False
    """Contents as a list of parts."""

    def adapted(self, row: Row) -> Row:
        if self.thinking and "reasoning_content" in row:
            row = {**row, "thinking": row["reasoning_content"]}
        if self.json_arguments and "tool_calls" in row:
            row = {**row, "tool_calls": [_with_json_arguments(call) for call in row["tool_calls"]]}
        if self.parts and isinstance(row.get("content"), str):
            row = {**row, "content": [{"type": "text", "text": row["content"]}]}
        return row


def choose_forms(source: str, probe: Callable[[Sequence[Row], RowForms], str | None]) -> RowForms:
    """Found by rendering; `probe` returns None where the template refuses."""
    forms = RowForms(thinking="reasoning_content" not in source and bool(_THINKING_FIELD.search(source)))
    in_parts = replace(forms, parts=True)
    if not _shows(probe([_ASKED], forms)) and _shows(probe([_ASKED], in_parts)):
        forms = in_parts
    as_text = replace(forms, json_arguments=True)
    if probe(CALLED[:2], forms) is None and probe(CALLED[:2], as_text) is not None:
        forms = as_text
    return forms


def wants_call_ids(probe: Callable[[Sequence[Row]], str | None]) -> bool:
    """A call without an id is refused, or written with nothing or `None` where its id would stand."""
    for rows in (CALLED, CALLED[:2]):
        named = probe(rows)
        if named is not None:
            plain = probe([_without_ids(row) for row in rows])
            return plain is None or (plain != named and plain in (named.replace(_ID, ""), named.replace(_ID, "None")))
    return False


def _shows(text: str | None) -> bool:
    return text is not None and str(_ASKED["content"]) in text


def _without_ids(row: Row) -> dict[str, Any]:
    plain = {key: value for key, value in row.items() if key != "tool_call_id"}
    if "tool_calls" in plain:
        plain["tool_calls"] = [{k: v for k, v in call.items() if k != "id"} for call in plain["tool_calls"]]
    return plain


def _with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
