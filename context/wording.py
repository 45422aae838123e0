"""How a message names what was probably meant, and quotes what was given."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST_NAME = 80
"""Characters of a name that are compared: it may come from a model, and comparing takes time."""


def excerpt(text: str, most: int) -> str:
    """The text, or its first characters if it has more than `most`."""
    return text if len(text) <= most else text[:most] + "..."


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is spelled most alike; None: none is at least `cutoff` alike, from 0 to 1."""
    return next(iter(difflib.get_close_matches(name[:_LONGEST_NAME], list(known), n=1, cutoff=cutoff)), None)


def suggest(name: str, known: Iterable[str]) -> str:
    """A closing sentence for an unknown name: the nearest known one, or all of them."""
    choices = list(known)
    similar = nearest(name, choices)
    if similar is not None:
        return f"Did you mean {similar}?"
    return f"There is {', '.join(choices)}." if choices else "There is none."
