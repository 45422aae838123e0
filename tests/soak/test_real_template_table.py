"""The whole table of real templates: every conversation with every strategy."""

from __future__ import annotations

import pytest

from tests.real_template_table import all_cases, failures, rows, table


@pytest.mark.soak
def test_no_count_of_the_whole_table_is_anything_but_zero() -> None:
    found = rows(all_cases())
    print(table(found))
    assert failures(found) == []
