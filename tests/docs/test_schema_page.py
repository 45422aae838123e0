"""docs/schema.md is what the tables, and the code that says what they hold, are today."""

from docs.schema import page
from tests.docs.blocks import ROOT


def test_schema_page_is_what_the_code_says_today() -> None:
    """Else: `python -m docs.schema > docs/schema.md`, and read what has changed."""
    assert page() == (ROOT / "docs" / "schema.md").read_text(encoding="utf-8")
