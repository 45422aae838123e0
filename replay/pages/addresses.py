"""Reads the parameters of an address, and makes addresses."""

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
"""How halves of surrogate pairs are quoted. Imported ids may have them, and they have no UTF-8."""


class BadQuery(ReplayError):
    """A parameter of an address breaks its rule."""


def read_path_part(request: Request, name: str) -> str:
    """Read a part of the path, which was quoted twice."""
    return unquote(request.path_params[name], errors=_HALVES)


def read_parameter(request: Request, name: str) -> str | None:
    """Read the last value of a parameter. None: there is none, or it is empty, as forms send it."""
    return next(iter(reversed(read_parameters(request, name))), None)


def read_parameters(request: Request, name: str) -> list[str]:
    return [value for value in request.query_params.getlist(name) if value]


def read_number(request: Request, name: str, default: int, *, least: int = 0, most: int = 2**53) -> int:
    return parse_number(name, read_parameter(request, name) or str(default), least=least, most=most)


def parse_number(name: str, given: str, *, least: int = 0, most: int = 2**53) -> int:
    if not (re.fullmatch("-?[0-9]{1,18}", given) and least <= int(given) <= most):
        upper = f" to {most}" if most < 2**53 else ""
        raise BadQuery(f"{name} must be a whole number from {least}{upper}, got {excerpt(given, 60)!r}.")
    return int(given)


def read_choice(request: Request, name: str, choices: Iterable[str]) -> str:
    """Read one of the choices. The first one is the default."""
    known = list(dict.fromkeys(map(str, choices)))
    given = read_parameter(request, name) or known[0]
    if given not in known:
        raise BadQuery(f"{name} must be one of {', '.join(known)}, got {excerpt(given, 60)!r}.")
    return given


_below: ContextVar[str] = ContextVar("below", default="")


@contextmanager
def addresses_below(path: str) -> Iterator[None]:
    """Let all addresses made within the block begin with this path, such as /in/FOLDER."""
    before = _below.set(path)
    try:
        yield
    finally:
        _below.reset(before)


def address(*parts: object, **parameters: object) -> str:
    """Make the address of some parts and parameters.

    A list gives its parameter several times. None and empty values are left out. A part is quoted twice, because
    servers read %2F in a path as a slash.
    """
    path = "/" + "/".join(_quoted(_quoted(part, ":@,=+$!~*'()"), ":@,=+$!~*'()") for part in parts)
    pairs = []
    for name, value in parameters.items():
        values = value if isinstance(value, list | tuple) else [value]
        pairs += [f"{quote(name)}={_quoted(v)}" for v in values if v is not None and v != ""]
    return _below.get() + path + ("?" + "&".join(pairs) if pairs else "")


def _quoted(value: object, safe: str = "") -> str:
    return quote(str(value), safe=safe, errors=_HALVES)
