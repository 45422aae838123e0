"""Texts that end a reply as a stop token does, such as ReAct's `Observation:`."""

from __future__ import annotations

from collections.abc import Sequence


def before_stop(text: str, stop_strings: Sequence[str]) -> str | None:
    """What stands before the first of `stop_strings`; None where there is none.

    Behind it may be a little more: what the token that completed it spells beside.
    """
    places = [place for place in map(text.find, stop_strings) if place >= 0]
    return text[: min(places)] if places else None
