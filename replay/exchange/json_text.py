"""JSON that anybody may have written, read strictly: lines of files, texts in rows, and rows of tasks."""

import json
from collections import Counter
from typing import Any

from replay.errors import shortened


class BadRow(ValueError):
    """A row of a file is wrong; the message is one line."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{shortened(twice)} stands twice in one object")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON: what is unknown is null")


_STRICT = json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_no_constant)
_WITH_CONSTANTS = json.JSONDecoder(object_pairs_hook=_distinct)


def read_json(text: str | bytes, *, constants: bool = False) -> Any:
    """The value of a JSON text without repeated keys; with `constants`, NaN and Infinity too. Raises ValueError."""
    given = text if isinstance(text, str) else text.decode()
    try:
        return (_WITH_CONSTANTS if constants else _STRICT).decode(given)
    except RecursionError:
        raise ValueError("nested too deep") from None


def json_line(line: bytes) -> Any:
    try:
        return read_json(line)
    except ValueError as error:
        raise BadRow(f"line must be JSON ({error}).") from None


def read_object(text: object, *, constants: bool = True) -> Any:
    """The value of a JSON text inside a row, for a type to check."""
    if not isinstance(text, str):
        raise ValueError("should be a text of JSON")
    try:
        return read_json(text, constants=constants)
    except ValueError as error:
        raise ValueError(f"should be JSON ({error})") from None
