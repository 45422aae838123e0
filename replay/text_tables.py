"""Numbers and tables as a terminal shows them."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from context.wording import excerpt, visible


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


Cell = str | tuple[str, int] | Callable[[Mapping[str, Any]], str]
"""A value's name, a number's with its digits behind the point, or what makes the text of a row."""


def row_table(rows: Sequence[Mapping[str, Any]], cells: Mapping[str, Cell]) -> str:
    """A line per row; `cells` by the titles of the columns."""
    return table(list(cells), [[_text(row, cell) for cell in cells.values()] for row in rows])


REQUESTS: dict[str, Cell] = {
    "request": lambda row: str(row["number"]),
    "": "lanes",
    "agent": lambda row: row["agent"] or "-",
    "begins": "begins",
    "reply": "status",
    "kept": "kept_tokens",
    "new": "new_tokens",
    "replied": "sampled_tokens",
    "segment": lambda row: "-" if row["segment"] is None else str(row["segment"]),
}


def _text(row: Mapping[str, Any], cell: Cell) -> str:
    if callable(cell):
        return cell(row)
    return str(row[cell]) if isinstance(cell, str) else number(row[cell[0]], cell[1])


def error_counts(kinds: str | None) -> str:
    """`3 raised, 1 malformed`, of the kinds of errors of a trajectory's tool calls."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter((kinds or "").split()).items()) or "-"


def quoted(name: str, most: int) -> Cell:
    """The beginning of a text, in quotes, which a row may not have."""
    return lambda row: "-" if row[name] is None else repr(excerpt(row[name], most))


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def state_text(row: Mapping[str, Any]) -> str:
    return str(row["state"]) + (f" ({row['state_reason']})" if row["state_reason"] else "")


def yes_or_no(name: str) -> Cell:
    return lambda row: "yes" if row[name] else "no"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}".replace("%", " %") if whole else "-"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
