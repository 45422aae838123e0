"""How a message names what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST_NAME = 80
"""Of a name that is compared: it may come from a model, and comparing takes time."""


def suggest(name: str, known: Iterable[str]) -> str:
    """A closing sentence for an unknown name: the nearest known one, or all of them."""
    choices = list(known)
    nearest = difflib.get_close_matches(name[:_LONGEST_NAME], choices, n=1, cutoff=0.6)
    if nearest:
        return f"Did you mean {nearest[0]}?"
    return f"There is {', '.join(choices)}." if choices else "There is none."
