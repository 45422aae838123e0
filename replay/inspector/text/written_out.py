"""Text as it is: characters that can't be seen, or that change how others are read, are written out.

What agents say and see may hold anything. A NUL, half of a surrogate pair or an override of the reading direction would
be lost, or would make a page show other text than was stored. The table stands in `static/visible.json`, which the
script of the same name reads too.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files

from markupsafe import Markup, escape

_TABLE = json.loads(files("replay.inspector").joinpath("static/visible.json").read_text(encoding="utf-8"))
_RANGES: list[tuple[int, int, str]] = [tuple(row) for row in _TABLE["ranges"]]
_NAMES: list[str] = _TABLE["names"]
_MOST_NAMED = 3
"""Different characters that the title of one mark names."""

_CHARACTERS = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last, _ in _RANGES)
_UNSEEN = re.compile(f"(?:(?![{re.escape(_TABLE['kept'])}])[{_CHARACTERS}])+")


def mark(character: str) -> str:
    """What stands for one character of the table: its usual name, or its number. Few fonts have pictures of them."""
    code = ord(character)
    name = _NAMES[code] if code < len(_NAMES) else "DEL" if code == 0x7F else f"U+{code:04X}"
    return f"\u27e8{name}\u27e9"


def visible(text: object) -> Markup:
    """For a page: escaped, and what can't be seen as marks whose title says what they are."""
    whole = str(text)
    parts, end = [], 0
    for found in _UNSEEN.finditer(whole):
        parts += [escape(whole[end : found.start()]), _marked(found[0])]
        end = found.end()
    return Markup("").join([*parts, escape(whole[end:])])


def visible_text(text: object) -> str:
    """For titles and other places without markup."""
    return _UNSEEN.sub(lambda found: "".join(map(mark, found[0])), str(text))


def _marked(run: str) -> Markup:
    title = ", ".join(
        f"U+{ord(character):04X} {_name(character)}" for character in list(dict.fromkeys(run))[:_MOST_NAMED]
    )
    return Markup('<span class="unseen" title="{}">{}</span>').format(title, "".join(map(mark, run)))


def _name(character: str) -> str:
    code = ord(character)
    return next(name for first, last, name in _RANGES if first <= code <= last)
