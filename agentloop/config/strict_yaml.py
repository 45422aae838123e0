"""A strict reader of YAML: it gives plain values and the line of every key.

PyYAML's own loaders share the value of an alias (a 430-byte file then becomes gigabytes), keep the last of two equal
keys, recurse without limit, and read YAML 1.1: `1e-5` is text there, `no` is false and `12:30` is 750. PyYAML's
composer gives the tree of marked nodes; values are built from it here, scalars by the YAML 1.2 core schema.
"""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from agentloop.errors import UserError

MAX_DEPTH = 50

KeyPath = tuple[str, ...]
"""The parts of a dotted path."""

_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# At most 300 digits: int() of thousands of digits is quadratic, and no key means such a number.
_INT = re.compile(r"[-+]?[0-9]{1,300}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
# libyaml is used where PyYAML has it: pure Python needs seconds for a large file.
_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


@dataclass(frozen=True)
class Document:
    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """1-based line of each mapping key, by its path from the top."""


def read_yaml(text: str, source: str, *, at: KeyPath = ()) -> Document:
    """Read the one YAML document in `text`, the value of the key `at` (the top by default).

    Raises UserError with one line that begins with `source`: `SOURCE:LINE: <key> must <rule>, got ...`.
    """
    try:
        _refuse_tricks(text, source, at)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        problem = shown((error.problem or "").removeprefix("but "))
        raise UserError(f"{place}: {_subject(at)} must be valid YAML, got: {problem}.") from None
    except (yaml.reader.ReaderError, UnicodeEncodeError) as error:
        raise UserError(f"{source}: {_subject(at)} must be readable text, got: {shown(error.reason)}.") from None
    if root is None:
        return Document(None)
    builder = _Builder(source)
    return Document(builder.value(root, at), builder.lines)


def resolve_scalar(text: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar in YAML 1.2; `.inf` and `.nan` become floats."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", "").lower())
    return text


def shown(value: object) -> str:
    """A value for an error message: one short line, without control characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:200])
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_tricks(text: str, source: str, at: KeyPath) -> None:
    """Raises UserError for deep nesting, anchors, aliases and tags, event by event, before anything is composed."""
    depth = 0
    event: Any
    for event in yaml.parse(text, Loader=_LOADER):
        rule = None
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            rule = f"must be nested at most {MAX_DEPTH} deep, got more. Flatten it."
        elif getattr(event, "anchor", None) or getattr(event, "tag", None):
            got = shown(text[event.start_mark.index : event.end_mark.index])
            rule = f"must not use YAML anchors, aliases or tags, got `{got}`. Write plain values out."
        if rule is not None:
            raise UserError(f"{_place(source, event)}: {_subject(at)} {rule}")


class _Builder:
    """Builds plain values from nodes by recursion; the depth of nodes is bounded."""

    def __init__(self, source: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._source = source

    def value(self, node: Any, path: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, path) for item in node.value]
        value = node.value if node.style else resolve_scalar(node.value)  # quoted and block scalars have a style
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(node, path, f"must be a finite number, got {shown(node.value)}.")
        return value

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, path, "must have text as keys, got a list or a mapping.")
            key = str(key_node.value)
            below = (*path, key)
            if key in values:
                first = f"on line {self.lines[below]}"
                raise self._error(key_node, below, f"must be given once, got it {first} too. Keep one.")
            self.lines.setdefault(below, key_node.start_mark.line + 1)
            values[key] = self.value(value_node, below)
        return values

    def _error(self, node: Any, path: KeyPath, rule: str) -> UserError:
        return UserError(f"{_place(self._source, node)}: {_subject(path)} {rule}")


def _place(source: str, marked: Any) -> str:
    return f"{source}:{marked.start_mark.line + 1}"


def _subject(path: KeyPath) -> str:
    return shown(".".join(path)) if path else "the file"
