"""JSON from strangers: one meaning per text, and no text that costs more memory than it is worth."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

_SMALL = 1 << 20
"""Characters that can't become more than some tens of megabytes, whatever they are."""
_MOST_CONTAINERS = 200_000
_MOST_TEXTS = 400_000
_MOST_DEPTH = 64
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_STRUCTURE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]', re.DOTALL)


class NotStrict(ValueError):
    """Why a text is not taken; begins with what it must do."""


def loads(text: str, *, constants: bool = False) -> Any:
    """The value of a JSON text without duplicate keys; with `constants`, NaN and Infinity are numbers."""
    _check_size(text)
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=None if constants else _no_constant)
    except NotStrict:
        raise
    except RecursionError:
        raise NotStrict(f"be nested at most {_MOST_DEPTH} deep") from None
    except ValueError as error:  # also for numbers of thousands of digits
        raise NotStrict(f"be JSON ({str(error).splitlines()[0]})") from None


def free_form(text: str, *, constants: bool = False) -> dict[str, Any]:
    """An object of any keys, which others will have to write down again: nested within reason."""
    value = loads(text, constants=constants)
    if not isinstance(value, dict):
        raise NotStrict(f"be a JSON object, got {shortened(text)}")
    if _is_deeper(value, _MOST_DEPTH):
        raise NotStrict(f"be nested at most {_MOST_DEPTH} deep")
    return value


def shortened(value: object) -> str:
    """For messages: one short line, whatever the value."""
    return _SHORT.repr(value)


def _check_size(text: str) -> None:
    """Small parts take many times their text: `{},` is 3 bytes and becomes 72."""
    if len(text) <= _SMALL:
        return
    containers = texts = 0
    for found in _STRUCTURE.finditer(text):
        if text[found.start()] == '"':
            texts += 1
        else:
            containers += 1
    if containers > _MOST_CONTAINERS or texts > _MOST_TEXTS:
        raise NotStrict(f"hold at most {_MOST_CONTAINERS:,} lists and objects and {_MOST_TEXTS:,} texts")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise NotStrict(f"have each key once, got {shortened(key)} twice")
            seen.add(key)
    return found


def _no_constant(name: str) -> NoReturn:
    raise NotStrict(f"write unknown numbers as null, got {name}")


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, (list, Mapping)):
        return False
    children = value.values() if isinstance(value, Mapping) else value
    return depth == 0 or any(_is_deeper(child, depth - 1) for child in children)
