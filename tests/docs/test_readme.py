from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import DOCUMENTS, ROOT, blocks

_LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)")


def test_own_environment_fits_in_twenty_lines() -> None:
    (block,) = [b for b in blocks() if b.note == ("file", "examples/calculator.py") and b.place.startswith("README.md")]
    assert len(block.text.splitlines()) <= 20


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_to_files_and_their_sections(document: Path) -> None:
    links = _LINK.findall(document.read_text(encoding="utf-8"))
    assert [target for target, _ in links if not (document.parent / target).exists()] == []
    sections = [((document.parent / target) if target else document, section) for target, section in links if section]
    assert [f"{page.name}#{section}" for page, section in sections if section not in headings(page)] == []


def headings(page: Path) -> set[str]:
    """As links name them: lower case, without punctuation, hyphens for spaces."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def test_readme_stays_one_page_of_reading() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000
