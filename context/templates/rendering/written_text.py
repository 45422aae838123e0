"""A text as a template wrote it, in which the template's own control tokens and each content can be found again.

A text alone does not tell who wrote what. So the template is given marks, and they are taken out of its text again:

    template              <|user|>{{ content }}<|end|>
    with its marks        (<|user|>){{ content }}(<|end|>)
    text with marks       (<|user|>)What is <|end|>?(<|end|>)
    text                  <|user|>What is <|end|>?<|end|>
    its own tokens        the first 8 characters and the last 7; the <|end|> between them is somebody's word

The two marks of a control token are half characters, which no content holds: `storable` replaces them. A content
carries numbered marks, and only while its place is looked for. They are letters and digits, which no template escapes
or looks for. They differ in every process, so that nobody can spell one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from functools import cached_property

from context.tokens.codec import Span

_OPEN, _CLOSE = "\ud800", "\udfff"
_OWN = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_NONCE = f"q{secrets.randbelow(10**18):018d}"
BREAK = f"-{secrets.randbelow(10**18):018d}-"
"""Stands within a text that would read as a control token, so that the tokenizer finds none there. BREAK is the same in
small letters and in capitals. It has hyphens at its ends, for some control tokens count only as words of their own."""
_NUMBERED = re.compile(f"{_NONCE}([be])([0-9]+)z")


class Written:
    """A text of a template, with the places of the control tokens that the template's source contains whole."""

    def __init__(self, marked: str, before: Written | None = None) -> None:
        """`before`: an earlier text of the conversation, which this one may begin with."""
        self.marked = marked
        if before is not None and marked.startswith(before.marked):
            self.text: str = before.text + _without_marks(marked[len(before.marked) :])
        else:
            self.text = _without_marks(marked)

    @cached_property
    def own(self) -> tuple[Span, ...]:
        """The places of the template's own control tokens."""
        starts = ((match.start() - 2 * number, match[1]) for number, match in enumerate(_OWN.finditer(self.marked)))
        return tuple(Span(start, start + len(token)) for start, token in starts)

    def after(self, before: Written) -> Written | None:
        """The part of the text after the text of `before`. None: this text does not begin with it."""
        if self.marked.startswith(before.marked):
            return Written(self.marked[len(before.marked) :])
        if not self.text.startswith(before.text):
            return None
        start = len(before.text)
        return Written(mark_own(self.text[start:], (span.moved(-start) for span in self.own if span.start >= start)))


def mark_own(text: str, spans: Iterable[Span]) -> str:
    """A text that a template wrote or holds, with marks around its own control tokens."""
    parts, at = [], 0
    for span in spans:
        parts += [text[at : span.start], _OPEN, span.cut_from(text), _CLOSE]
        at = span.end
    return "".join([*parts, text[at:]])


def _without_marks(marked: str) -> str:
    return marked.replace(_OPEN, "").replace(_CLOSE, "")


def mark_content(text: str, number: int) -> str:
    """A content with marks around it; the white space at its ends stays outside."""
    inner = text.strip()
    before, _, behind = text.partition(inner)
    return f"{before}{_NONCE}b{number}z{inner}{_NONCE}e{number}z{behind}"


def find_marked_contents(marked: str) -> tuple[str, dict[int, Span]]:
    """The text without the marks of its contents, and the first place of each content by its number."""
    text, *marks = _NUMBERED.split(marked)
    begun: dict[str, int] = {}
    found: dict[int, Span] = {}
    for kind, number, behind in zip(marks[::3], marks[1::3], marks[2::3], strict=True):
        if kind == "b":
            begun[number] = len(text)
        elif number in begun:
            found.setdefault(int(number), Span(begun[number], len(text)))
        text += behind
    return text, found
