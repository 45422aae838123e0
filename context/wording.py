"""Text for people and stores: made visible, made storable, cut short, and the nearest of known names."""

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from itertools import takewhile

_LONGEST_NAME = 80
"""Characters of a name that are compared. A model may write a long name, and comparing takes time."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Cc: terminal control; Cf: invisible, bidirectional; Cs: half characters; Co: private use; Z: lines.
_WRITTEN_OUT = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def visible(text: str) -> str:
    """The text in one line. A line break or an unseen character is written as `<U+001B>`."""
    if text.isprintable():
        return text
    return "".join(f"<U+{ord(one):04X}>" if unicodedata.category(one) in _WRITTEN_OUT else one for one in text)


def visible_lines(text: str) -> str:
    """Make every line of the text `visible`, and keep the line breaks."""
    return "\n".join(map(visible, text.split("\n")))


def storable(text: str) -> str:
    """The text with U+FFFD for half characters, which neither a tokenizer nor a database can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text)
    return text


def excerpt(text: str, most: int) -> str:
    """The text, or its first characters if it has more than `most`."""
    return text if len(text) <= most else text[:most] + "..."


def shared_opening(first: str, second: str) -> str:
    """The common beginning of two texts."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(character for character, _ in same)


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name with the most similar spelling. None: no name reaches the similarity `cutoff`, from 0 to 1."""
    return next(iter(difflib.get_close_matches(name[:_LONGEST_NAME], list(known), n=1, cutoff=cutoff)), None)


def suggest(name: str, known: Iterable[str]) -> str:
    """A closing sentence for an unknown name: it names the nearest known name, or all known names."""
    choices = list(known)
    if (similar := nearest(name, choices)) is not None:
        return f"Did you mean {similar}?"
    return f"There is {', '.join(choices)}." if choices else "There is none."


def share(part: float, whole: float) -> str:
    """`12.5 %`; a dash where there is no whole."""
    return f"{part / whole:.1%}".replace("%", " %") if whole else "-"


def error_counts(kinds: str | None) -> str:
    """`3 raised, 1 malformed`, from the kinds of errors of a trajectory's tool calls."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter((kinds or "").split()).items()) or "-"
