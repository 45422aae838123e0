"""docs/gateway.md names every reason of a branch, and all that becomes of a reply."""

from __future__ import annotations

from context.tokens.session_nodes import Fork, Status
from tests.docs.blocks import ROOT
from tests.docs.tables import table

PAGE = ROOT / "docs" / "gateway.md"


def test_every_fork_and_every_status_has_a_row() -> None:
    assert [row["fork"].strip("`") for row in table(PAGE, "fork")] == ["none", *Fork]
    assert {row["status"].strip("`"): row["trained"] == "yes" for row in table(PAGE, "status")} == {
        status: status == Status.TRAINED for status in Status
    }
