"""The documentation is one path of short paragraphs, and its generated pages are what their commands write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

INDEX = ROOT / "docs" / "index.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
READ = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
MOST_CHARACTERS = 600
REMOVED_WORDS = re.compile(r"\b(anew|beside|told|born|worth|likewise|twins?)\b", re.IGNORECASE)
"""They stood for what the field has names for; see tests/test_names.py."""
_LINK = re.compile(r"\]\((?!https?://)([^)#]+)[^)]*\)")
_ITEM = re.compile(r"(?:[-*+]|\d+\.)\s")
_NO_PROSE = ("#", "|", "<!--", "![")


def paragraphs(page: Path) -> Iterator[str]:
    """Blocks of text outside of fences and tables; each item of a list is one."""
    lines: list[str] = []
    is_code = False
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        text = line.strip()
        ends = not text or text.startswith((*_NO_PROSE, "```")) or _ITEM.match(text) is not None or is_code
        if ends and lines:
            yield " ".join(lines)
            lines = []
        is_code ^= text.startswith("```")
        if text and not is_code and not text.startswith((*_NO_PROSE, "```")):
            lines.append(text)


def links(page: Path) -> set[Path]:
    return {(page.parent / target).resolve() for target in _LINK.findall(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_no_paragraph_is_long(page: Path) -> None:
    assert [(len(text), text[:60]) for text in paragraphs(page) if len(text) > MOST_CHARACTERS] == []


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    assert REMOVED_WORDS.findall(page.read_text(encoding="utf-8")) == []


def test_every_page_is_reached_from_the_index() -> None:
    reached: set[Path] = set()
    left = [INDEX]
    while left:
        page = left.pop()
        if page not in reached:
            reached.add(page)
            left += [target for target in links(page) if target.suffix == ".md" and target.parent == INDEX.parent]
    assert set(PAGES) - reached == set()


def test_readme_leads_to_the_index() -> None:
    assert INDEX in links(ROOT / "README.md")
