"""Text for a terminal: what would act on it, or can't be seen, is written out."""

from __future__ import annotations

import unicodedata

# Cc: terminal control; Cf: invisible, bidirectional; Cs: half characters; Co: private use; Z: lines.
_WRITTEN_OUT = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def visible(text: str) -> str:
    """In one line: `<U+001B>` for a character that is not to be seen, line breaks among them."""
    return text if text.isprintable() else "".join(map(_visible, text))


def visible_lines(text: str) -> str:
    """Several lines, as they are broken."""
    return "\n".join(map(visible, text.split("\n")))


def _visible(character: str) -> str:
    return f"<U+{ord(character):04X}>" if unicodedata.category(character) in _WRITTEN_OUT else character
