"""What a configuration without an environment class must hold."""

from __future__ import annotations

from typing import Any

import pytest

from agentloop.config import RunConfig

WHOLE: dict[str, dict[str, Any]] = {
    "environment": {"name": "rows", "tools": ["tools.py:add"]},
    "tasks": {"data": "rows.jsonl"},
    "reward": {"functions": ["judge.py:right", {"function": "judge.py:brief", "weight": 0.1}]},
}


def test_functions_are_named_alone_or_with_a_weight() -> None:
    functions = RunConfig.model_validate(WHOLE).reward.functions
    assert [(row.function, row.weight, row.name) for row in functions] == [
        ("judge.py:right", 1.0, "right"),
        ("judge.py:brief", 0.1, "brief"),
    ]


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("environment", {"name": "lookup_chain"}, "environment.tools must be left out unless environment.name is rows"),
        ("tasks", {"data": None}, "tasks.data must name rows when environment.name is rows, got null"),
        ("reward", {"functions": []}, "reward.functions must name a function when environment.name is rows"),
        ("reward", {"environment": 0.5}, "reward.environment must be left at 1 when environment.name is rows"),
    ],
)
def test_what_is_missing_or_would_be_ignored_is_refused(section: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({**WHOLE, section: {**WHOLE[section], **values}})
