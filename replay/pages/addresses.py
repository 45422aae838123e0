"""What an address asks, and how addresses are made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from context.wording import excerpt
from replay.errors import ReplayError

if TYPE_CHECKING:
    from starlette.requests import Request

_HALVES = "surrogatepass"
"""Imported ids may hold half of a surrogate pair, which has no UTF-8 of its own."""


class BadQuery(ReplayError):
    """A parameter that breaks its rule."""


def in_path(request: Request, name: str) -> str:
    """A part of the path, which was quoted twice."""
    return unquote(request.path_params[name], errors=_HALVES)


def text(request: Request, name: str) -> str | None:
    """The last value; an empty one, as forms send it, counts as none."""
    return next(iter(reversed(texts(request, name))), None)


def texts(request: Request, name: str) -> list[str]:
    return [value for value in request.query_params.getlist(name) if value]


def whole(request: Request, name: str, default: int, *, least: int = 0, most: int = 2**53) -> int:
    return whole_number(name, text(request, name) or str(default), least=least, most=most)


def whole_number(name: str, given: str, *, least: int = 0, most: int = 2**53) -> int:
    if not (re.fullmatch("-?[0-9]{1,18}", given) and least <= int(given) <= most):
        upper = f" to {most}" if most < 2**53 else ""
        raise BadQuery(f"{name} must be a whole number from {least}{upper}, got {excerpt(given, 60)!r}.")
    return int(given)


def choice(request: Request, name: str, choices: Iterable[str]) -> str:
    """One of the choices, of which the first one is meant where nothing is given."""
    known = list(dict.fromkeys(map(str, choices)))
    given = text(request, name) or known[0]
    if given not in known:
        raise BadQuery(f"{name} must be one of {', '.join(known)}, got {excerpt(given, 60)!r}.")
    return given


_below: ContextVar[str] = ContextVar("below", default="")


@contextmanager
def addresses_below(path: str) -> Iterator[None]:
    """Let all addresses that are made meanwhile begin with this path, as those of a run among others."""
    before = _below.set(path)
    try:
        yield
    finally:
        _below.reset(before)


def address(*parts: object, **parameters: object) -> str:
    """The path of some parts, with a query: lists give a parameter several times, None and empty ones are left out.

    A part is quoted twice, for servers read %2F in a path as a slash.
    """
    path = "/" + "/".join(_quoted(_quoted(part, ":@,=+$!~*'()"), ":@,=+$!~*'()") for part in parts)
    pairs = []
    for name, value in parameters.items():
        values = value if isinstance(value, list | tuple) else [value]
        pairs += [f"{quote(name)}={_quoted(v)}" for v in values if v is not None and v != ""]
    return _below.get() + path + ("?" + "&".join(pairs) if pairs else "")


def _quoted(value: object, safe: str = "") -> str:
    return quote(str(value), safe=safe, errors=_HALVES)
