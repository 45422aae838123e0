"""What a template writes is read back equal, in every dialect."""

from __future__ import annotations

import random
import zlib

import pytest

from tests.context.parse.dialects import DIALECTS, Dialect, reply, tools_of

CONVERSATIONS = 200
"""Of each dialect, shared by its templates."""


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.template)
def test_calls_are_read_back_as_they_were_written(dialect: Dialect) -> None:
    chance = random.Random(zlib.crc32(dialect.template.encode()))
    for _ in range(-(-CONVERSATIONS // sum(other.parser == dialect.parser for other in DIALECTS))):
        row = reply(dialect, chance)
        text = dialect.written(row)
        read = dialect.parse(tools_of(row)).parse(text, stopped=True)
        assert (read.outcome, read.problem) == ("tool_calls", None), text
        expected = [
            (call["function"]["name"], call["function"]["arguments"], call.get("id")) for call in row["tool_calls"]
        ]
        found = [(call.name, dict(call.arguments), call.id) for call in read.message.tool_calls]
        assert repr(sorted_keys(found)) == repr(sorted_keys(expected)), text  # 1 and True are equal, and not the same
        assert read.message.content.strip() == row["content"], text
        assert (read.message.reasoning or "").strip() == row.get("reasoning_content", ""), text


def sorted_keys(value: object) -> object:
    """Gemma's template sorts the keys."""
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    return [sorted_keys(row) for row in value] if isinstance(value, (list, tuple)) else value
