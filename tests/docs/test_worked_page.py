"""docs/worked-example.md is what its generator writes, and no arithmetic on it is wrong."""

from __future__ import annotations

import pytest

from docs.worked_example import hand, page
from tests.docs.blocks import ROOT


def test_page_is_what_the_modules_compute_today() -> None:
    """Else: `python -m docs.worked_example > docs/worked-example.md`, and read what has changed."""
    assert page() == (ROOT / "docs" / "worked-example.md").read_text(encoding="utf-8")


def test_arithmetic_that_the_modules_do_not_find_is_refused() -> None:
    assert hand("1 - 1/2", 0.5) == "1 - 1/2 = 0.5"
    with pytest.raises(ValueError, match="1 - 1/3 must be 0.5, which the modules found, got 0.666"):
        hand("1 - 1/3", 0.5)
