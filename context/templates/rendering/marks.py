"""Marks put into contents before a template renders them, and taken out of the text it wrote.

They are letters, digits and hyphens, which no template escapes or looks for, and differ in every process, so that
nobody can spell one.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from dataclasses import dataclass

_NONCE = f"q{secrets.randbelow(10**18):018d}"
BREAK = f"-{_NONCE}k-"
"""Stands within what would read as a control token: the tokenizer finds none there.

It ends in hyphens, for some control tokens count only as words of their own."""
_MARK = re.compile(f"{BREAK}|{_NONCE}([be])([0-9]+)z")


@dataclass(frozen=True)
class Span:
    """Characters first..end-1 of a text, which one author wrote."""

    first: int
    end: int
    author: str


def begin(number: int) -> str:
    return f"{_NONCE}b{number}z"


def end(number: int) -> str:
    return f"{_NONCE}e{number}z"


class MarkedText:
    """What a template wrote, with the marks still in it."""

    def __init__(self, marked: str) -> None:
        self.marked = marked
        parts = marked.split(BREAK)
        self.text = "".join(parts)
        self._breaks: list[int] = []
        at = 0
        for part in parts[:-1]:
            at += len(part)
            self._breaks.append(at)
            at += len(BREAK)

    def place(self, marked_place: int) -> int:
        """The place in `text` of a place in `marked`."""
        return marked_place - len(BREAK) * bisect_left(self._breaks, marked_place)


def without_breaks(text: str) -> str:
    return text.replace(BREAK, "")


def numbered_spans(marked: str) -> tuple[str, dict[int, tuple[int, int]]]:
    """The text without its marks, and the first place of each numbered content in it."""
    parts: list[str] = []
    begun: dict[int, int] = {}
    found: dict[int, tuple[int, int]] = {}
    at = last = 0
    for match in _MARK.finditer(marked):
        parts.append(marked[last : match.start()])
        at += match.start() - last
        last = match.end()
        if match[1] == "b":
            begun[int(match[2])] = at
        elif match[1] == "e" and int(match[2]) in begun:
            number = int(match[2])
            found.setdefault(number, (begun[number], at))
    parts.append(marked[last:])
    return "".join(parts), found


def last_end(marked: str) -> str:
    """The mark behind the content written last; empty if there is none."""
    found = [match[0] for match in _MARK.finditer(marked) if match[1] == "e"]
    return found[-1] if found else ""


def next_begin(marked: str, start: int) -> int:
    """Where the first content at or behind `start` begins; the text's length if there is none."""
    found = next((match for match in _MARK.finditer(marked, start) if match[1] == "b"), None)
    return len(marked) if found is None else found.start()
