"""How a message names what was probably meant, and quotes what was given."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_LONGEST_NAME = 80
"""Characters of a name that are compared: it may come from a model, and comparing takes time."""


def excerpt(text: str, most: int) -> str:
    """The text, or its first characters if it has more than `most`."""
    return text if len(text) <= most else text[:most] + "..."


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that was probably meant."""
    return next(iter(difflib.get_close_matches(name[:_LONGEST_NAME], known, n=1, cutoff=0.6)), None)


def suggest(name: str, known: Iterable[str]) -> str:
    """A closing sentence for an unknown name: the nearest known one, or all of them."""
    choices = list(known)
    near = nearest(name, choices)
    if near is not None:
        return f"Did you mean {near}?"
    return f"There is {', '.join(choices)}." if choices else "There is none."
