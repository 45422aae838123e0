"""Where a text holds control tokens, as its tokenizer recognises them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from context.tokens.tokenizer_parts import Description, tokenizer_of

_UNKNOWN = "[unknown]"


@dataclass(frozen=True)
class Control:
    """A control token in a text: characters first..end-1, white space it takes up among them."""

    token: int
    first: int
    end: int


class ControlFinder:
    """Finds a tokenizer's control tokens in a text."""

    def __init__(self, description: Description, control: Sequence[Mapping[str, Any]]) -> None:
        """`control`: the rows of `description` that are looked for."""
        self._ids = {str(row["content"]): int(row["id"]) for row in control}
        self._literal = _literal(control) if _as_spelled(description, control) else None
        self._scanner = None if self._literal else _scanner(description, control)

    def find(self, text: str) -> list[Control]:
        if self._literal:
            return [Control(self._ids[found[0]], *found.span()) for found in self._literal.finditer(text)]
        assert self._scanner is not None
        encoding = self._scanner.encode(text, add_special_tokens=False)
        ids = [*self._ids.values()]
        return [
            Control(ids[number - 1], first, end)
            for number, (first, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if number
        ]


def _as_spelled(description: Description, control: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each is recognised wherever its letters stand, and takes up nothing else."""
    if any(row.get(flag) for row in control for flag in ("lstrip", "rstrip", "single_word")):
        return False
    # Those that are looked for in normalized text come after all others.
    normalized = {bool(row.get("normalized")) for row in control}
    return normalized <= {False} or (len(normalized) == 1 and description.get("normalizer") is None)


def _literal(control: Sequence[Mapping[str, Any]]) -> re.Pattern[str]:
    longest_first = sorted((str(row["content"]) for row in control), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _scanner(description: Description, control: Sequence[Mapping[str, Any]]) -> Tokenizer:
    """The tokenizer with one unknown word for all that stands between control tokens."""
    model = {"type": "WordLevel", "vocab": {_UNKNOWN: 0}, "unk_token": _UNKNOWN}
    added = [{**row, "id": number} for number, row in enumerate(control, 1)]
    return tokenizer_of({**description, "model": model, "added_tokens": added, "pre_tokenizer": None, "decoder": None})
