"""Options of samplers, checked against the dataclass that declares them."""

from __future__ import annotations

import difflib
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal


def checked_options(declared: type, given: Mapping[str, Any], *, sampler: str) -> Any:
    """An instance of the options class. Raises ValueError, of one line, for what it does not declare or allow."""
    kinds = typing.get_type_hints(declared)
    known = [field.name for field in fields(declared)]
    for name, value in given.items():
        if name not in known:
            raise ValueError(
                f"replay.sampler_options must hold options of {sampler}, got {name!r}. {_hint(name, known)}"
            )
        if not _fits(value, kinds[name]):
            raise ValueError(f"replay.sampler_options.{name} must be {_named(kinds[name])}, got {value!r}.")
    try:
        return declared(**given)
    except ValueError as error:
        raise ValueError(f"replay.sampler_options.{error}") from None


def require(allowed: bool, name: str, rule: str, value: object) -> None:
    """For an options class to refuse a value: `name` must `rule`."""
    if not allowed:
        raise ValueError(f"{name} must {rule}, got {value!r}.")


def _hint(name: object, known: list[str]) -> str:
    nearest = difflib.get_close_matches(str(name)[:80], known, n=1)
    if nearest:
        return f"Did you mean {nearest[0]}?"
    return f"There is {', '.join(known)}." if known else "It has none."


def _fits(value: object, kind: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(kind))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    plain = typing.get_origin(kind) or kind
    return not isinstance(plain, type) or isinstance(value, plain)


def _named(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if isinstance(kind, types.UnionType):
        return " or ".join(_named(part) for part in typing.get_args(kind))
    names = {float: "a finite number", int: "a whole number", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(kind, f"a {getattr(kind, '__name__', kind)}")
