"""A small, strict reading of YAML: plain values and the line of every key, nothing that can surprise.

PyYAML's own loaders follow aliases (a 430-byte file then becomes gigabytes), keep the last of two equal keys,
recurse without limit, and read YAML 1.1: `1e-5` is text there, `no` is false and `12:30` is 750. This reader
takes only PyYAML's event stream and resolves scalars by the YAML 1.2 core schema.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from agentloop.errors import UserError

MAX_BYTES = 1_000_000
MAX_DEPTH = 50
Path = tuple[str, ...]
"""A dotted path, in parts."""


# libyaml where PyYAML has it: the pure Python scanner needs seconds for a file of the largest size allowed.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})


# At most 300 digits: int() of thousands of digits is quadratic, and no key means such a number.
_INT = re.compile(r"[-+]?[0-9]{1,300}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Document:
    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    """1-based line of each mapping key, by its path from the top."""


def read_yaml(text: str, source: str, *, at: Path = ()) -> Document:
    """The one YAML document in `text`, for the key `at` (the top by default).

    `source` names it in errors, `UserError`s of one line: `SOURCE:LINE: <key> must <rule>, got ...`.
    """
    if len(text) > MAX_BYTES:
        raise UserError(f"{source}: {_subject(at)} must be at most {MAX_BYTES} bytes, got more. Shorten it.")
    return _Reader(text, source, at).document()


def resolve_scalar(text: str) -> bool | int | float | str | None:
    """What an unquoted scalar means in YAML 1.2; `inf` and `nan` come back as floats."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", "").lower())
    return text


def shown(value: object) -> str:
    """A value for an error message: on one line, short, with nothing a terminal would obey."""
    text = value if isinstance(value, str) else _as_yaml(value)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:200])
    return text if len(text) <= 60 else text[:57] + "..."


def _as_yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(_as_yaml(item) for item in value[:9]) + ("]" if len(value) < 10 else ", ...]")
    if isinstance(value, dict):
        items = [f"{key}: {_as_yaml(item)}" for key, item in list(value.items())[:9]]
        return "{" + ", ".join(items) + ("}" if len(value) < 10 else ", ...}")
    return repr(value)


class _Reader:
    """Recursive descent over PyYAML's events; recursion is bounded by `MAX_DEPTH`."""

    def __init__(self, text: str, source: str, at: Path) -> None:
        self._source = source
        self._at = at
        self._lines: dict[Path, int] = {}
        self._events: Iterator[Any] = self._parsed(text)

    def document(self) -> Document:
        event = next(self._events)
        while isinstance(event, (yaml.StreamStartEvent, yaml.DocumentStartEvent)):
            event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            return Document(None)
        value = self._node(event, self._at, 1)
        next(self._events)
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise self._error(after, self._at, "must hold one document, got a second. Remove what follows `---`.")
        return Document(value, self._lines)

    def _parsed(self, text: str) -> Iterator[Any]:
        try:
            yield from yaml.parse(text, Loader=_LOADER)
        except yaml.MarkedYAMLError as error:
            mark: Any = error.problem_mark or error.context_mark
            place = f"{self._source}:{mark.line + 1}" if mark else self._source
            problem = shown(error.problem or "")
            raise UserError(f"{place}: {_subject(self._at)} must be valid YAML, got: {problem}.") from None
        except (yaml.reader.ReaderError, UnicodeEncodeError) as error:
            raise UserError(
                f"{self._source}: {_subject(self._at)} must be readable text, got: {shown(error.reason)}."
            ) from None

    def _node(self, event: Any, path: Path, depth: int) -> Any:
        if isinstance(event, yaml.AliasEvent):
            name = shown(event.anchor)
            raise self._error(event, path, f"must not use YAML aliases, got `*{name}`. Write the value out.")
        if event.anchor is not None:
            name = shown(event.anchor)
            raise self._error(event, path, f"must not use YAML anchors, got `&{name}`. Remove it.")
        if event.tag is not None:
            name = shown(event.tag)
            raise self._error(event, path, f"must not use YAML tags, got `{name}`. Write a plain value.")
        if depth > MAX_DEPTH:
            raise self._error(event, path, f"must be nested at most {MAX_DEPTH} deep, got more. Flatten it.")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, path)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
                items.append(self._node(event, path, depth + 1))
            return items
        return self._mapping(path, depth)

    def _mapping(self, path: Path, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self._node(event, path, depth + 1)
                raise self._error(event, path, "must have text as keys, got a list or a mapping.")
            key = str(event.value)
            below = (*path, key)
            self._node(event, below, depth + 1)
            if key in values:
                first = f"on line {self._lines[below]}"
                raise self._error(event, below, f"must be given once, got it {first} too. Keep one.")
            self._lines.setdefault(below, self._line(event))
            values[key] = self._node(next(self._events), below, depth + 1)
        return values

    def _scalar(self, event: Any, path: Path) -> Any:
        # implicit[0] is False for quoted and block scalars, which are always text.
        if not event.implicit[0]:
            return event.value
        value = resolve_scalar(event.value)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(event, path, f"must be a finite number, got {shown(event.value)}.")
        return value

    def _line(self, event: Any) -> int:
        return int(event.start_mark.line) + 1

    def _error(self, event: Any, path: Path, rule: str) -> UserError:
        return UserError(f"{self._source}:{self._line(event)}: {_subject(path)} {rule}")


def _subject(path: Path) -> str:
    return shown(".".join(path)) if path else "the file"
