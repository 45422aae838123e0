"""Templates, and how values are shown in them."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from replay.inspector.server.query_string import address
from replay.inspector.text.written_out import visible, visible_text
from replay.report.svg import number


def environment() -> Environment:
    """Every value is escaped; a name that a page does not give is an error, not a gap.

    What can't be seen is written out wherever a template does not ask for a value as it is (`| e`), as the fields of
    a form must have it.
    """
    templates = Environment(
        loader=PackageLoader("replay.inspector"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_seen,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "digits": digits,
        "number": significant,
        "short": short,
        "percent": percent,
        "signed": signed,
        "visible": visible,
    }
    templates.globals |= {"address": address}
    return templates


def _seen(value: Any) -> Any:
    return visible_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def digits(value: float | None, places: int = 3) -> str:
    """A fixed number of decimals; a dash where nothing is known."""
    return "\u2013" if value is None else f"{value:,.{places}f}"


def significant(value: float | None) -> str:
    """Three significant digits."""
    return "\u2013" if value is None else number(value)


def signed(value: float | None, places: int = 3) -> str:
    """With its sign; the minus is as wide as the plus."""
    return digits(value, places) if value is None else f"{value:+,.{places}f}".replace("-", "\u2212")


def percent(value: float | None) -> str:
    return "\u2013" if value is None else f"{100 * value:.1f}\u00a0%"


def short(id: str, length: int = 10) -> str:
    """The beginning of an id, enough to tell it from others on a page."""
    return id[:length]
