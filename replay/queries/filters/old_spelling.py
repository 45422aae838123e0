"""Filters in the spelling of SQL, which many try first: what they are as Python expressions."""

from __future__ import annotations

import ast
import re

from context.wording import excerpt

_TEXT = re.compile(r"""(['"])((?:(?!\1).|\1\1)*+)\1""", re.DOTALL)
"""A quote within a text is doubled."""
_SPELLINGS = (
    (r"\bnull\b", "None"),
    (r"\btrue\b", "True"),
    (r"\bfalse\b", "False"),
    (r"<>", "!="),
    (r"(?<![=<>!:])=(?!=)", "=="),
    (r"\bin\s*\(\s*([^(),\s]+)\s*\)", r"in [\1]"),
    (r"\b(\w++)\s++(not\s+)?contains\s+(\0\d+\0)", r"\3 \2in \1"),
)
_WORDS = re.compile(r"\b(AND|OR|NOT|IN|IS|LIKE|CONTAINS)\b", re.IGNORECASE)
_LIKE = re.compile(r"\b(\w++)\s++(not\s+)?like\s+\0(\d+)\0")
_LONGEST = 300
"""Characters of an expression that is shown."""


def in_python(text: str) -> str | None:
    """How Python spells the filter; None where that is no other spelling, and where Python has no equivalent."""
    if "\0" in text:
        return None
    texts: list[str] = []

    def hidden(text: str) -> str:
        texts.append(text)
        return f"\0{len(texts) - 1}\0"

    def like(found: re.Match[str]) -> str:
        name, inverse, pattern = found[1], found[2] or "", texts[int(found[3])]
        part = hidden(pattern.strip("%"))
        if re.search(r"[_\\]|[^%]%+[^%]", pattern):
            return found[0]
        if pattern[:1] != "%":
            return f"{inverse}{name}.startswith({part})" if pattern[-1:] == "%" else f"{inverse}{name} == {part}"
        return f"{part} {inverse}in {name}" if pattern[-1:] == "%" else found[0]

    plain = _TEXT.sub(lambda found: hidden(found[2].replace(found[1] * 2, found[1])), text)
    spelled = _WORDS.sub(lambda found: found[0].lower(), plain)
    for sql, python in _SPELLINGS:
        spelled = re.sub(sql, python, spelled, flags=re.IGNORECASE)
    spelled = _LIKE.sub(like, spelled)
    has_doubled = any(quote * 2 in inner for quote, inner in _TEXT.findall(text))
    if spelled == plain and not has_doubled:
        return None
    spelled = re.sub(r"\0(\d+)\0", lambda found: repr(texts[int(found[1])]), spelled)
    try:
        ast.parse(spelled, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return excerpt(spelled, _LONGEST)
