"""Commands as a person would type them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_PLAIN = re.compile(r"[^\"$`\\!\x00-\x1f]+")
"""Means the same between double quotes, also to a shell that people type into."""


def typed(words: Sequence[str]) -> str:
    """For a shell. Filters hold single quotes, which are easier to read between double ones."""
    return " ".join(f'"{word}"' if "'" in word and _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)
