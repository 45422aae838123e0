"""The fenced blocks of the documentation, and the tables of its pages."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_NOTE = re.compile(r"<!-- ([a-z ]+): (.+) -->")


@dataclass(frozen=True)
class Block:
    place: str
    """`FILE:LINE` of its fence."""
    language: str
    """Empty if the fence names none."""
    text: str
    note: tuple[str, str] | None
    """`("not run", why)` or `("file", path)`, from a comment on the line before the fence."""

    def commands(self) -> list[str]:
        return [line for line in self.text.splitlines() if line and not line.startswith("#")]


def blocks() -> list[Block]:
    return [block for document in DOCUMENTS for block in _blocks_of(document)]


def _blocks_of(document: Path) -> Iterator[Block]:
    lines = document.read_text(encoding="utf-8").splitlines()
    opened: int | None = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        comment = _NOTE.fullmatch(lines[opened - 1].strip())
        yield Block(
            place=f"{document.relative_to(ROOT)}:{opened + 1}",
            language=lines[opened].strip().removeprefix("```"),
            text="".join(f"{inner}\n" for inner in lines[opened + 1 : number]),
            note=(comment[1], comment[2]) if comment else None,
        )
        opened = None
    assert opened is None, f"{document}: a fence is never closed"


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
