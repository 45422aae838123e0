"""Numbers and tables as a terminal shows them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from context.visible import visible


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their contents; numbers to the right. Nothing is cut."""
    rows = [list(map(visible, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    right = [all(re.fullmatch(r"[-+0-9.e%]+", text) for text in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text.rjust(width) if flush else text.ljust(width)
            for text, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in [titles, *rows]
    ]
    return "\n".join(lines)


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}".replace("%", " %") if whole else "-"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
