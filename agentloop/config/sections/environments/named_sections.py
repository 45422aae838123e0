"""Sections that have names of the user's: what is wrong with one is said with its own key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from replay.setting_types import Section, rule_in_words

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_Kind = TypeVar("_Kind", bound=Section)


def read_sections(values: Any, key: str, kind: type[_Kind]) -> Any:
    """The mapping with each value read as `kind`; what is no mapping, as it is. Raises ValueError, with the key."""
    if not isinstance(values, dict):
        return values
    return {name: _read(f"{key}.{_checked(str(name), key)}", value, kind) for name, value in values.items()}


def _checked(name: str, key: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{key} must have names of A-Z, a-z, 0-9, _ and -, got {name!r}. Rename it.")
    return name


def _read(where: str, value: Any, kind: type[_Kind]) -> _Kind:
    if isinstance(value, kind):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a mapping, got {value!r}. See docs/environments.md.")
    try:
        return kind.model_validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        problem = _problem(where, error.errors(include_url=False)[0], value, kind)
    raise ValueError(problem)


def _problem(where: str, error: ErrorDetails, value: Mapping[str, Any], kind: type[Section]) -> str:
    if error["type"] == "value_error":
        rule = error["msg"].removeprefix("Value error, ")
        if " must " not in rule:  # it names no key
            return f"{where} {rule}, got {', '.join(value) or 'nothing'}. Change it."
        return f"{where}.{rule.removeprefix('environment.')}"
    schema = kind.model_json_schema()
    part, given = schema, value
    for key in error["loc"]:
        keys = part.get("properties", {})
        if isinstance(key, str) and keys and key not in keys:
            return f"{where}.{key} must be a known key, got an unknown one. Known are {', '.join(keys)}."
        if key not in keys:
            break
        where, part, given = f"{where}.{key}", keys[key], given.get(str(key), "nothing")
        part = schema["$defs"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else part
    return f"{where} must be {rule_in_words(part)}, got {given!r}. Change it."
