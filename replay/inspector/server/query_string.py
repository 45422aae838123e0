"""What an address asks, taken apart: every parameter has a type, and an error names the wrong one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import TypeVar
from urllib.parse import quote, unquote

from context.wording import excerpt

Choice = TypeVar("Choice", bound=StrEnum)

_MOST_VALUES = 50
"""The most values of one parameter."""
_LONGEST = 10_000
"""Characters of one value."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


class BadQuery(Exception):
    """A parameter that breaks its rule."""


class QueryString:
    """The parameters of one request; `path` holds those that stand in the path."""

    def __init__(self, parameters: Sequence[tuple[str, str]] = (), path: Mapping[str, str] | None = None) -> None:
        self._path = {name: unquote(value) for name, value in (path or {}).items()}
        self._values: dict[str, list[str]] = {}
        for name, value in parameters:
            values = self._values.setdefault(name, [])
            values.append(value)
            if len(values) > _MOST_VALUES:
                raise BadQuery(f"{name} must be given at most {_MOST_VALUES} times, got more. Leave some out.")
            if len(value) > _LONGEST:
                raise BadQuery(f"{name} must have at most {_LONGEST:,} characters, got {len(value):,}. Shorten it.")

    def path(self, name: str) -> str:
        return self._path[name]

    def texts(self, name: str) -> list[str]:
        """All values that are not empty."""
        return [value for value in self._values.get(name, ()) if value]

    def text(self, name: str) -> str | None:
        """The last value; an empty one, as forms send it, counts as none."""
        return next(reversed(self.texts(name)), None)

    def whole(self, name: str, default: int, *, least: int = 0, most: int = 2**53) -> int:
        return self._whole(name, self.text(name), default, least, most)

    def path_whole(self, name: str, *, least: int = 0, most: int = 2**53) -> int:
        return self._whole(name, self._path[name], 0, least, most)

    def flag(self, name: str) -> bool:
        given = self._values.get(name)
        if not given:
            return False
        if given[-1] in _TRUE or given[-1] in _FALSE:
            return given[-1] in _TRUE
        raise BadQuery(f"{name} must be true or false, got {excerpt(given[-1], 60)!r}.")

    def choice(self, name: str, default: Choice) -> Choice:
        kind, given = type(default), self.text(name)
        if given is None:
            return default
        if given not in kind.__members__.values():
            raise BadQuery(f"{name} must be one of {', '.join(kind)}, got {excerpt(given, 60)!r}.")
        return kind(given)

    def items(self) -> list[tuple[str, str]]:
        """Every parameter that says something, in order."""
        return [(name, value) for name, values in self._values.items() for value in values if value]

    def given(self) -> dict[str, str]:
        """The last value of every parameter, empty ones too."""
        return {name: values[-1] for name, values in self._values.items()}

    @staticmethod
    def _whole(name: str, given: str | None, default: int, least: int, most: int) -> int:
        if given is None:
            return default
        if not (re.fullmatch("-?[0-9]{1,18}", given) and least <= int(given) <= most):
            upper = f" to {most}" if most < 2**53 else ""
            raise BadQuery(f"{name} must be a whole number from {least}{upper}, got {excerpt(given, 60)!r}.")
        return int(given)


_below: ContextVar[str] = ContextVar("below", default="")


@contextmanager
def addresses_below(path: str) -> Iterator[None]:
    """Meanwhile all addresses that are made begin with this path, as that of a run among others."""
    before = _below.set(path)
    try:
        yield
    finally:
        _below.reset(before)


def address(*parts: object, **parameters: object) -> str:
    """The path of some parts, with a query: lists give a parameter several times, None and empty ones are left out.

    A part is quoted twice, for servers read %2F in a path as a slash.
    """
    path = "/" + "/".join(quote(quote(str(part), safe=":@,=+$!~*'()"), safe=":@,=+$!~*'()") for part in parts)
    pairs = []
    for name, value in parameters.items():
        values = value if isinstance(value, list | tuple) else [value]
        pairs += [f"{quote(name)}={quote(str(v), safe='')}" for v in values if v is not None and v != ""]
    return _below.get() + path + ("?" + "&".join(pairs) if pairs else "")
