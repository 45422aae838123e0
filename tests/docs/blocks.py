"""The fenced blocks of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
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
