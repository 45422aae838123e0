"""The documentation is one path of short paragraphs, and its generated pages are what their commands write."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from context.tokens.session_nodes import Fork, Status
from docs import schema
from tests.docs.blocks import DOCUMENTS, ROOT, blocks, table

INDEX = ROOT / "docs" / "index.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
READ = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
MOST_CHARACTERS = 600
REMOVED_WORDS = re.compile(r"\b(anew|beside|told|born|worth|likewise|twins?)\b", re.IGNORECASE)
"""They stood for what the field has names for; see tests/test_names.py."""
_LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)")
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


def links(page: Path) -> list[tuple[Path, str]]:
    """Files, and their sections where they are named."""
    found = _LINK.findall(page.read_text(encoding="utf-8"))
    return [((page.parent / target).resolve() if target else page, section) for target, section in found]


def headings(page: Path) -> set[str]:
    """As links name them: lower case, without punctuation, hyphens for spaces."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


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
            left += [target for target, _ in links(page) if target.suffix == ".md" and target.parent == INDEX.parent]
    assert set(PAGES) - reached == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_to_files_and_their_sections(document: Path) -> None:
    assert [target.name for target, _ in links(document) if not target.exists()] == []
    found = [f"{page.name}#{section}" for page, section in links(document) if section and section not in headings(page)]
    assert found == []


def test_readme_is_one_page_of_reading_that_leads_to_the_index() -> None:
    readme = ROOT / "README.md"
    assert (INDEX, "") in links(readme)
    assert len(readme.read_text(encoding="utf-8").split()) <= 1000
    (block,) = [b for b in blocks() if b.note == ("file", "examples/calculator.py") and b.place.startswith("README.md")]
    assert len(block.text.splitlines()) <= 20


def test_every_fork_and_every_status_of_a_request_has_a_row() -> None:
    page = ROOT / "docs" / "gateway.md"
    assert [row["fork"].strip("`") for row in table(page, "fork")] == ["none", *Fork]
    found = {row["status"].strip("`"): row["trained"] == "yes" for row in table(page, "status")}
    assert found == {status: status == Status.TRAINED for status in Status}


def test_schema_page_is_what_the_tables_and_the_code_that_says_what_they_hold_are_today() -> None:
    assert schema.page() == (ROOT / "docs" / "schema.md").read_text(encoding="utf-8")
