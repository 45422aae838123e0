"""Marks in what a template is given and in what it holds, by which its text tells who wrote what.

A template's own control tokens stand between two half characters, which no content holds: `storable` replaces them.
Contents carry marks only while their places are looked for: letters, digits and hyphens, which no template escapes or
looks for, and which differ in every process, so that nobody can spell one.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from context.tokens.codec import Control

_OPEN, _CLOSE = "\ud800", "\udfff"
_OWN = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_NONCE = f"q{secrets.randbelow(10**18):018d}"
BREAK = f"-{secrets.randbelow(10**18):018d}-"
"""Stands within what would read as a control token: the tokenizer finds none there. It is the same in small letters and
in capitals, and has hyphens at its ends, for some control tokens count only as words of their own."""
_NUMBERED = re.compile(f"{_NONCE}([be])([0-9]+)z")


@dataclass(frozen=True)
class Span:
    """Characters first..end-1 of a text, which one author wrote."""

    first: int
    end: int
    author: str


def own(text: str, places: Iterable[tuple[int, int]]) -> str:
    """A text that a template wrote or holds, with its own control tokens at these places marked."""
    parts, at = [], 0
    for first, end in places:
        parts += [text[at:first], _OPEN, text[first:end], _CLOSE]
        at = end
    return "".join([*parts, text[at:]])


def inner(text: str, control: Control) -> tuple[int, int]:
    """A control token's place without the white space it takes up."""
    spelled = text[control.first : control.end]
    first = control.first + len(spelled) - len(spelled.lstrip())
    return first, first + len(spelled.strip())


class Written:
    def __init__(self, marked: str, before: Written | None = None) -> None:
        """`before`: what it may begin with."""
        self.marked = marked
        if before is not None and marked.startswith(before.marked):
            self.text: str = before.text + _plain(marked[len(before.marked) :])
        else:
            self.text = _plain(marked)

    @cached_property
    def own(self) -> tuple[tuple[int, int], ...]:
        """First and last character (exclusive) of each control token that stands whole in the template's source."""
        firsts = ((match.start() - 2 * number, match[1]) for number, match in enumerate(_OWN.finditer(self.marked)))
        return tuple((first, first + len(token)) for first, token in firsts)

    def behind(self, place: int) -> Written:
        own_ones = self.own[bisect_left(self.own, (place, place)) :]
        return Written(own(self.text[place:], ((first - place, end - place) for first, end in own_ones)))

    def rest(self, before: Written) -> Written | None:
        """What is behind the text of `before`; None where this one does not begin with it."""
        if self.marked.startswith(before.marked):
            return Written(self.marked[len(before.marked) :])
        return self.behind(len(before.text)) if self.text.startswith(before.text) else None


def _plain(marked: str) -> str:
    return marked.replace(_OPEN, "").replace(_CLOSE, "")


def begin(number: int) -> str:
    return f"{_NONCE}b{number}z"


def end(number: int) -> str:
    return f"{_NONCE}e{number}z"


def numbered_spans(marked: str) -> tuple[str, dict[int, tuple[int, int]]]:
    """The text without its marks, and the first place of each numbered content in it."""
    text, *marks = _NUMBERED.split(marked)
    begun: dict[str, int] = {}
    found: dict[int, tuple[int, int]] = {}
    for kind, number, behind in zip(marks[::3], marks[1::3], marks[2::3], strict=True):
        if kind == "b":
            begun[number] = len(text)
        elif number in begun:
            found.setdefault(int(number), (begun[number], len(text)))
        text += behind
    return text, found
