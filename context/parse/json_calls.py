"""Tool calls as JSON: one object, or a list of objects. Refuses JSON that readers could understand differently."""

import json
import math
from typing import Any

from context.messages import ToolCall
from context.parse.reply import MAX_DEPTH, TOO_DEEP, Malformed, check_id, check_tool_name, skip_space
from context.wording import storable

SAME_KEY = "a tool call has the same key twice"
_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_ID_KEYS = ("id", "tool_call_id")


def strict_json(text: str) -> Any:
    """The one JSON value of a text. Malformed: the same key twice, NaN, infinity, half characters, endless numbers."""
    value, end = json_at(text, 0)
    if text[end:].strip():
        raise Malformed(f"a tool call is not valid JSON: Extra data at character {end}")
    return value


def json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, behind white space, and its end."""
    begin = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, begin)
        if text.count("[", begin, end) + text.count("{", begin, end) > MAX_DEPTH and _depth(value) > MAX_DEPTH:
            raise Malformed(TOO_DEEP)
    except json.JSONDecodeError as error:
        raise Malformed(f"a tool call is not valid JSON: {error.msg} at character {error.pos - begin}") from None
    except RecursionError:
        raise Malformed(TOO_DEEP) from None
    except ValueError:  # int() refuses more than 4,300 digits
        raise Malformed("a tool call holds a number that is too long") from None
    if text.find("\\u", begin, end) >= 0 and storable(said := json.dumps(value, ensure_ascii=False)) != said:
        raise Malformed("a tool call holds half a character")
    return value, end


def calls_of(value: Any) -> tuple[ToolCall, ...]:
    rows = value if isinstance(value, list) else [value]
    if not rows:
        raise Malformed("the list of tool calls is empty")
    return tuple(map(_call_of, rows))


def _call_of(row: Any) -> ToolCall:
    if not isinstance(row, dict):
        raise Malformed("a tool call is not a JSON object")
    # Programs pass calls on as {"type": "function", "id": ..., "function": {"name": ..., "arguments": ...}}.
    inner = row["function"] if isinstance(row.get("function"), dict) else row
    name = next((inner[key] for key in _NAME_KEYS if key in inner), None)
    given = [key for key in _ARGUMENT_KEYS if key in inner]
    if len(given) > 1:
        raise Malformed("a tool call has arguments twice")
    arguments = arguments_of(inner[given[0]], given[0]) if given else {}
    return ToolCall(check_tool_name(name), arguments, _id_of(inner) or _id_of(row))


def arguments_of(value: Any, key: str = "arguments") -> dict[str, Any]:
    """The arguments of a call from an object, from the JSON text of one, or from nothing."""
    if isinstance(value, str):
        value = strict_json(value) if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Malformed(f'"{key}" of a tool call is not a JSON object')
    return value


def _id_of(row: dict[str, Any]) -> str | None:
    found = next((row[key] for key in _ID_KEYS if key in row), None)
    return None if found is None or found == "" else check_id(str(found))


def _depth(value: Any) -> int:
    """Return how deep lists and objects are nested."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(_depth, children), default=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise Malformed(SAME_KEY)
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Malformed("a tool call holds a number that is too large")
    return value


def _not_a_number(text: str) -> float:
    raise Malformed(f"a tool call holds {text}, which is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_not_a_number)
