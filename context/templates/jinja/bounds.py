"""How much time and memory a chat template may take: what would take more is refused before it does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from time import monotonic
from typing import Any

import jinja2

DEADLINE_SECONDS = 5.0
_MAX_SIZE = 2**26
"""Characters or elements of one value."""
_MAX_BITS = 2**14
_MAX_TOTAL = 2**30
"""Of all large values of a rendering together."""
_LARGE = 2**16
_MAX_NODES = 2**20
_MAX_INDENT = 100
_MAX_DIGITS = 1000
_NUMBER = re.compile(r"[0-9]+")
_WIDTH_GIVEN = re.compile(r"\{[^{}]*\{")


class OutOfBounds(jinja2.TemplateError):
    """A template takes too long, or makes something too large."""


class Bounds:
    """The clock and the scales of a template's environment, and the operations that can make much of little."""

    def __init__(self) -> None:
        self._deadline = float("inf")
        self._total = 0

    def start(self) -> None:
        self._deadline = monotonic() + DEADLINE_SECONDS
        self._total = 0

    def tick(self) -> bool:
        """Once in every turn of a loop, and every call of a macro."""
        if monotonic() > self._deadline:
            raise OutOfBounds(f"a rendering must end within {DEADLINE_SECONDS:g} seconds, this one does not")
        return True

    def charge(self, size: int) -> None:
        """Raises OutOfBounds for a value of this size where it is too much, alone or with those before it."""
        if size <= _LARGE:
            return
        self._total += min(size, _MAX_TOTAL)
        if size > _MAX_SIZE or self._total > _MAX_TOTAL:
            raise OutOfBounds(f"a value must have at most {_MAX_SIZE} characters or elements, this one would have more")

    def added(self, first: Any, *others: Any) -> Any:
        """The sum of values, from left to right."""
        result = first
        for value in others:
            result = result + value
            if (result.__class__ is str or hasattr(result, "__len__")) and len(result) > _LARGE:
                self.charge(len(result))
        return result

    def multiplied(self, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and hasattr(value, "__len__"):
                self.charge(len(value) * times)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        return left * right

    def raised(self, base: Any, exponent: Any) -> Any:
        if isinstance(base, int) and isinstance(exponent, int):
            _check_bits(base.bit_length() * exponent)
        return base**exponent

    def modulo(self, left: Any, right: Any) -> Any:
        if isinstance(left, str):
            self._charge_format(left, "%", right if isinstance(right, tuple | Mapping) else (right,))
        return left % right

    def text(self, value: Any) -> str:
        """`str`, also of lists that hold the same list again and again."""
        if value.__class__ is not str and isinstance(value, list | tuple | Mapping):
            self.charge_whole(value)
        return str(value)

    def concat(self, parts: Iterable[str]) -> str:
        """The text of a rendering, a block or a macro."""
        found = parts if isinstance(parts, list) else list(parts)
        self.charge(sum(map(len, found)))
        return "".join(found)

    def joined(self, values: Iterable[Any], separator: Any = "") -> str:
        found = [self.text(value) for value in values]
        self.charge(sum(map(len, found)) + len(separator) * len(found))
        return str(separator).join(found)

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """jinja2's own filter escapes for HTML; transformers' does not."""
        self.charge_whole(value)
        if isinstance(indent, str) or (isinstance(indent, int) and indent > _MAX_INDENT):
            raise OutOfBounds(f"tojson must indent by at most {_MAX_INDENT} spaces, not by {str(indent)[:20]}")
        marks = None if separators is None else tuple(separators)
        return _json_encoder(ensure_ascii, indent, marks, sort_keys).encode(value)

    def charge_whole(self, value: Any) -> None:
        """A value with all it holds, each time it is held."""
        waiting, nodes, size = [value], 0, 0
        while waiting:
            found = waiting.pop()
            nodes += 1
            if isinstance(found, str):
                size += len(found)
            elif found.__class__ is dict or isinstance(found, Mapping):
                waiting += found
                waiting += found.values()
            elif isinstance(found, list | tuple):
                waiting += found
            if nodes > _MAX_NODES or len(waiting) > _MAX_NODES:
                raise OutOfBounds(f"a value must hold at most {_MAX_NODES} others, this one holds more")
        self.charge(size)

    def charge_call(self, called: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """A call of a method of a text or a number that can make much of little; returns its arguments."""
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps `format`
        charge = _METHODS.get(getattr(method, "__name__", ""))
        owner = getattr(method, "__self__", None)
        if charge is None or not isinstance(owner, str | bytes | int):
            return args
        if charge is _joined and args and not hasattr(args[0], "__len__"):
            args = (list(args[0]), *args[1:])  # what `map` gives can be read only once
        charge(self, owner, (*args, *kwargs.values()))
        return args

    def _charge_format(self, pattern: str, sign: str, values: Iterable[Any]) -> None:
        found = [*values.values()] if isinstance(values, Mapping) else [*values]
        widths = sum(_number(digits) for digits in _NUMBER.findall(pattern)) if sign in pattern else 0
        if "*" in pattern or _WIDTH_GIVEN.search(pattern):
            widths += sum(value for value in found if isinstance(value, int))
        longest = max((len(self.text(value)) for value in found), default=0)
        self.charge(len(pattern) + widths + pattern.count(sign) * longest)


@lru_cache(32)
def _json_encoder(
    ensure_ascii: bool, indent: int | None, separators: tuple[str, ...] | None, sort_keys: bool
) -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)  # type: ignore[arg-type]  # a pair


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise OutOfBounds(f"a number must have at most {_MAX_BITS} bits, this one would have more")


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 12 else _MAX_TOTAL


def _width(bounds: Bounds, text: Any, args: tuple[Any, ...]) -> None:
    bounds.charge(max((value for value in args if isinstance(value, int)), default=0))


def _tabs(bounds: Bounds, text: Any, args: tuple[Any, ...]) -> None:
    bounds.charge(len(text) * max((value for value in args if isinstance(value, int)), default=8))


def _replaced(bounds: Bounds, text: Any, args: tuple[Any, ...]) -> None:
    if len(args) > 1 and isinstance(args[0], type(text)) and isinstance(args[1], type(text)):
        bounds.charge(len(text) + text.count(args[0]) * max(0, len(args[1]) - len(args[0])))


def _joined(bounds: Bounds, text: Any, args: tuple[Any, ...]) -> None:
    if args:
        bounds.charge(sum(len(value) for value in args[0] if isinstance(value, str)) + len(text) * len(args[0]))


def _translated(bounds: Bounds, text: Any, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], Mapping):
        bounds.charge(len(text) * max((len(value) for value in args[0].values() if isinstance(value, str)), default=1))


def _formatted(bounds: Bounds, text: Any, args: tuple[Any, ...]) -> None:
    found = [value for given in args for value in (given.values() if isinstance(given, Mapping) else [given])]
    bounds._charge_format(text, "{", found)


_METHODS: dict[str, Callable[[Bounds, Any, tuple[Any, ...]], None]] = {
    "center": _width,
    "ljust": _width,
    "rjust": _width,
    "zfill": _width,
    "to_bytes": _width,
    "expandtabs": _tabs,
    "replace": _replaced,
    "join": _joined,
    "translate": _translated,
    "format": _formatted,
    "format_map": _formatted,
}


def bounded_filters(bounds: Bounds, own: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Those of jinja2's filters that take a width or a count, or put much together; `own` are jinja2's."""

    def with_width(name: str) -> Callable[..., Any]:
        def filtered(value: Any, *args: Any, **kwargs: Any) -> Any:
            lines = value.count("\n") + 1 if name == "indent" and isinstance(value, str) else 1
            for given in (*args, *kwargs.values()):
                bounds.charge(
                    lines * (len(given) if isinstance(given, str) else given if isinstance(given, int) else 0)
                )
            return own[name](value, *args, **kwargs)

        return filtered

    def wordwrapped(value: Any, *args: Any, **kwargs: Any) -> Any:
        texts = [len(given) for given in (*args, *kwargs.values()) if isinstance(given, str)]
        bounds.charge(len(value) * max(texts, default=1))
        return own["wordwrap"](value, *args, **kwargs)

    def replaced(value: Any, old: str, new: str, count: int | None = None) -> str:
        text = bounds.text(value)
        _replaced(bounds, text, (str(old), str(new)))
        return text.replace(str(old), str(new), -1 if count is None else count)

    def formatted(value: Any, *args: Any, **kwargs: Any) -> Any:
        return bounds.modulo(bounds.text(value), kwargs or args)

    def rounded(value: Any, precision: int = 0, method: Any = "common") -> Any:
        if abs(precision) > _MAX_DIGITS:
            raise OutOfBounds(f"round must be to at most {_MAX_DIGITS} digits, not to {str(precision)[:20]}")
        return own["round"](value, precision, method)

    wide = {name: with_width(name) for name in ("center", "indent", "batch", "slice")}
    return {
        **wide,
        "wordwrap": wordwrapped,
        "replace": replaced,
        "format": formatted,
        "round": rounded,
        "tojson": bounds.tojson,
        "string": bounds.text,
    }
