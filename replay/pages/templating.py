"""The environment of the templates, and the filters that write values in them."""

import re
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from context.wording import error_counts, visible
from replay.pages.addresses import address
from replay.pages.panels import number
from replay.questions.runs import wilson_bounds

_DASH = "\u2013"


def environment() -> Environment:
    """Make the environment of the templates. Every value is escaped, and a missing value is an error.

    Invisible characters are written out. Only the fields of forms need values as they are, and use `| e`.
    """
    templates = Environment(
        loader=PackageLoader("replay.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_seen,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "digits": digits,
        "number": lambda value: _DASH if value is None else number(value),
        # Ids and hashes that agentloop makes have at least 32 characters. Ids that somebody chose are shown whole.
        "short": lambda id, length=10: id if len(id) < 32 else id[:length],
        "error_counts": error_counts,
        "percent": lambda value: _DASH if value is None else f"{100 * value:.1f}\u00a0%",
        "interval": interval,
        "signed": partial(digits, sign="+"),
    }
    templates.globals |= {"address": address, "saved": False}
    return templates


def interval(share: float | None, trials: float | None) -> str:
    """Write the 95 % interval of a share of so many trials. A share or a number that is not known becomes a dash."""
    ends = wilson_bounds(share, trials) if share is not None and trials else ()
    return " to ".join(f"{100 * end:.1f}\u00a0%" for end in ends) or _DASH


def visible_text(text: str) -> str:
    """Write out characters that are invisible, or change the direction of text. Line breaks and tabs stay.

    `static/scales.js` has the same function for scripts.
    """
    if text.isprintable():
        return text
    return "".join(part if part in "\n\t" else visible(part) for part in re.split(r"([\n\t])", text))


def _seen(value: Any) -> Any:
    return visible_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def digits(value: float | None, places: int = 3, *, sign: str = "-") -> str:
    """Write a number with fixed decimals and a wide minus. `sign="+"` writes a plus too. None becomes a dash."""
    return _DASH if value is None else f"{value:{sign},.{places}f}".replace("-", "\u2212")
