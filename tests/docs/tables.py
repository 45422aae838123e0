"""Tables of a page of the documentation."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

Table = list[dict[str, str]]


def tables(page: Path) -> list[Table]:
    """Each table's rows, every cell by the name of its column."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found = []
    for is_table, group in groupby(lines, lambda line: line.startswith("|")):
        if is_table:
            head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in group]
            found.append([dict(zip(head, row, strict=True)) for row in body])
    return found


def table(page: Path, column: str) -> Table:
    """The only table that has a column of this name."""
    (found,) = [rows for rows in tables(page) if column in rows[0]]
    return found
