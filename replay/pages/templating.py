"""Templates, and how values are shown in them."""

import re
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from context.wording import error_counts, visible
from replay.pages.addresses import address
from replay.pages.panels import number

_DASH = "\u2013"


def environment() -> Environment:
    """Every value is escaped; a name that a page does not give is an error, not a gap.

    What can't be seen is written out wherever a template does not ask for a value as it is (`| e`), as the fields of
    a form must have it.
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
        "short": lambda id, length=10: id[:length],
        "error_counts": error_counts,
        "percent": lambda value: _DASH if value is None else f"{100 * value:.1f}\u00a0%",
        "signed": partial(digits, sign="+"),
    }
    templates.globals |= {"address": address, "saved": False}
    return templates


def visible_text(text: str) -> str:
    """The text as a page shows it: what can't be seen, or would change how the rest is read, is written out.

    Line breaks and tabs stay. `static/scales.js` does the same.
    """
    if text.isprintable():
        return text
    return "".join(part if part in "\n\t" else visible(part) for part in re.split(r"([\n\t])", text))


def _seen(value: Any) -> Any:
    return visible_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def digits(value: float | None, places: int = 3, *, sign: str = "-") -> str:
    """A fixed number of decimals, the minus as wide as a plus, which `sign` may ask for; a dash for what is unknown."""
    return _DASH if value is None else f"{value:{sign},.{places}f}".replace("-", "\u2212")
