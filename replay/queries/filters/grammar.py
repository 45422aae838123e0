"""The text of a filter as a tree of typed comparisons.

    any        := all ("or" all)*
    all        := one ("and" one)*
    one        := "not" one | "(" any ")" | comparison
    comparison := FIELD ( = | != | < | <= | > | >= ) VALUE
                | FIELD ["not"] "in" "(" VALUE ("," VALUE)* ")"
                | FIELD ["not"] ("like" | "contains") TEXT
                | FIELD "is" ["not"] "null"
                | FIELD                                        (of kind truth)
    VALUE      := 0.5 | 'text' | "text" | true | false         (a quote within is doubled)

Every comparison is true or false: what is unknown equals nothing and is neither greater nor smaller than anything, so
`error != 'timeout'` holds where there was no error.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from replay.errors import ReplayError
from replay.queries.filters.fields import FIELDS, Field, Kind

_DEEPEST = 50
_MOST_COMPARISONS = 200
_MOST_VALUES = 500
_LONGEST_PATTERN = 10_000
"""Characters: SQLite gives up on patterns of more than 50,000 bytes."""
_LARGEST_COUNT = 2**63


_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
    |(?P<number>[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?(?![A-Za-z0-9_.]))
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<sign><=|>=|!=|<>|==|=|<|>|\(|\)|,)
    |(?P<end>\Z))""",
    re.VERBOSE,
)
_WORDS = {"and", "or", "not", "in", "like", "contains", "is", "null", "true", "false"}
_SAME_SIGN = {"==": "=", "<>": "!="}
_EQUAL = ("=", "!=", "in")
_ORDER = ("<", "<=", ">", ">=")
_SIGNS = {
    Kind.number: (*_EQUAL, *_ORDER),
    Kind.whole: (*_EQUAL, *_ORDER),
    Kind.truth: _EQUAL,
    Kind.text: (*_EQUAL, "like", "contains"),
    Kind.messages: (*_EQUAL, "like", "contains"),
    Kind.calls: _EQUAL,
}


Value = float | int | bool | str


class WrongFilter(ReplayError):
    """A filter that can't be read; the error says where."""


@dataclass(frozen=True)
class Comparison:
    field: Field
    sign: str
    """= < <= > >= in like contains null; the others are negations of these."""
    values: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Not:
    part: Node


@dataclass(frozen=True)
class All:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class AnyOf:
    parts: tuple[Node, ...]


Node = Comparison | Not | All | AnyOf


def parsed(text: str) -> Node:
    """Raises WrongFilter with the position of what it could not read."""
    reader = _Reader(text)
    node = reader.any_of(0)
    if not reader.at("end"):
        reader.refuse("go on with `and` or `or`")
    return node


def check_size(trees: Sequence[Node]) -> None:
    """Of filters that all hold: SQLite takes an expression of a certain depth. Raises WrongFilter."""
    found = sum(map(_comparisons, trees))
    if found > _MOST_COMPARISONS:
        raise WrongFilter(
            f"where must hold at most {_MOST_COMPARISONS} comparisons in all, got {found}. Leave some of them out."
        )


def _comparisons(node: Node) -> int:
    if isinstance(node, Comparison):
        return 1
    return sum(map(_comparisons, (node.part,) if isinstance(node, Not) else node.parts))


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    position: int
    """Of its first character, from 1."""


class _Reader:
    """Recursive descent, one token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._offset = 0
        self._comparisons = 0
        self._next = self._read()

    def any_of(self, depth: int) -> Node:
        return self._list("or", lambda: self._list("and", lambda: self._one(depth), All), AnyOf)

    def at(self, kind: str, *texts: str) -> bool:
        return self._next.kind == kind and (not texts or self._next.text in texts)

    def refuse(self, rule: str, advice: str = "") -> NoReturn:
        raise _wrong(rule, self._next, advice)

    def _list(self, word: str, part: Callable[[], Node], join: type[All | AnyOf]) -> Node:
        parts = [part()]
        while self._take("word", word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else join(tuple(parts))

    def _one(self, depth: int) -> Node:
        if depth > _DEEPEST:
            self.refuse(f"nest at most {_DEEPEST} deep")
        if self._take("word", "not"):
            return Not(self._one(depth + 1))
        if self._take("sign", "("):
            node = self.any_of(depth + 1)
            self._expect("sign", ")")
            return node
        return self._comparison()

    def _comparison(self) -> Node:
        self._comparisons += 1
        if self._comparisons > _MOST_COMPARISONS:
            self.refuse(f"hold at most {_MOST_COMPARISONS} comparisons")
        field = self._field()
        if self._take("word", "is"):
            inverse = self._take("word", "not") is not None
            place = self._expect("word", "null")
            if field.asks_messages:
                raise _wrong(f"compare {field.name} with {field.kind.value}", place)
            return _inverted(Comparison(field, "null"), inverse)
        inverse = self._take("word", "not") is not None
        sign = self._take("word", "in", "like", "contains") or (
            None if inverse else self._take("sign", *_EQUAL, *_ORDER)
        )
        if sign is None:
            if field.kind is Kind.truth and not inverse:
                return Comparison(field, "=", (True,))
            self.refuse(f"compare {field.name}", f"For example: {_example(field)}")
        if sign.text not in _SIGNS[field.kind]:
            raise _wrong(f"compare {field.name} by {', '.join(_SIGNS[field.kind])}", sign)
        values = self._values(field) if sign.text == "in" else (self._value(field, pattern=sign.text == "like"),)
        if sign.text == "!=":
            return Not(Comparison(field, "=", values))
        return _inverted(Comparison(field, sign.text, values), inverse)

    def _field(self) -> Field:
        token = self._next
        if token.kind != "word" or token.text in _WORDS:
            self.refuse("name a field here", f"Fields: {', '.join(FIELDS)}.")
        if token.text not in FIELDS:
            near = difflib.get_close_matches(token.text, FIELDS, n=1, cutoff=0.5)
            advice = f"Did you mean {near[0]}?" if near else f"Fields: {', '.join(FIELDS)}."
            raise _wrong("name a field here", token, advice)
        self._advance()
        return FIELDS[token.text]

    def _values(self, field: Field) -> tuple[Value, ...]:
        self._expect("sign", "(")
        values = [self._value(field)]
        while self._take("sign", ","):
            if len(values) == _MOST_VALUES:
                self.refuse(f"list at most {_MOST_VALUES} values")
            values.append(self._value(field))
        self._expect("sign", ")")
        return tuple(values)

    def _value(self, field: Field, *, pattern: bool = False) -> Value:
        token = self._next
        value = _value_of(token, field.kind)
        if value is None:
            advice = "Use `is null`." if token.text == "null" else f"For example: {_example(field)}"
            raise _wrong(f"compare {field.name} with {field.kind.value}", token, advice)
        if field.choices and not pattern and value not in field.choices:
            raise _wrong(f"compare {field.name} with one of {', '.join(field.choices)}", token)
        if pattern and len(str(value)) > _LONGEST_PATTERN:
            raise _wrong(f"have patterns of at most {_LONGEST_PATTERN} characters", token, "Use `contains`.")
        self._advance()
        return value

    def _take(self, kind: str, *texts: str) -> _Token | None:
        if not self.at(kind, *texts):
            return None
        token = self._next
        self._advance()
        return token

    def _expect(self, kind: str, text: str) -> _Token:
        return self._take(kind, text) or self.refuse(f"have `{text}` here")

    def _advance(self) -> None:
        self._next = self._read()

    def _read(self) -> _Token:
        match = _TOKEN.match(self._text, self._offset)
        if match is None or match.lastgroup is None:
            start = len(self._text) - len(self._text[self._offset :].lstrip())
            rest = _Token("rest", self._text[start:], start + 1)
            raise _wrong("be made of fields, comparisons and values", rest, "Texts stand in quotes: 'text'.")
        self._offset = match.end()
        kind, text = match.lastgroup, match[match.lastgroup]
        if kind == "word":
            text = text.lower()
        return _Token(kind, _SAME_SIGN.get(text, text), match.start(kind) + 1)


def _value_of(token: _Token, kind: Kind) -> Value | None:
    """None: a value of another kind."""
    if kind is Kind.truth:
        return {"true": True, "false": False}.get(token.text) if token.kind == "word" else None
    if kind in (Kind.text, Kind.messages, Kind.calls):
        quote = token.text[:1]
        return token.text[1:-1].replace(quote * 2, quote) if token.kind == "text" else None
    if token.kind != "number":
        return None
    number = float(token.text)
    if not math.isfinite(number):
        return None
    if kind is Kind.number:
        return number
    if not number.is_integer() or abs(number) > _LARGEST_COUNT:
        return None
    whole = int(token.text) if re.fullmatch(r"[-+]?[0-9]+", token.text) else int(number)
    return whole if -_LARGEST_COUNT <= whole < _LARGEST_COUNT else None


def _inverted(comparison: Comparison, inverse: bool) -> Node:
    return Not(comparison) if inverse else comparison


def _example(field: Field) -> str:
    if field.choices:
        return f"{field.name} = '{field.choices[0]}'"
    ends = {
        Kind.number: " > 0.5",
        Kind.whole: " < 8",
        Kind.truth: " = true",
        Kind.text: " = 'name'",
        Kind.messages: " contains 'words'",
        Kind.calls: " = 'lookup'",
    }
    return field.name + ends[field.kind]


def _wrong(rule: str, token: _Token, advice: str = "") -> WrongFilter:
    shown = token.text if len(token.text) <= 40 else token.text[:40] + "..."
    got = "its end" if token.kind == "end" else repr(shown)
    return WrongFilter(f"where must {rule}, got {got} at character {token.position}. {advice}".rstrip())
