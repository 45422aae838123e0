"""What a template writes is read back equal, in every dialect; whatever is done to it has an explicit outcome."""

from __future__ import annotations

import json
import random
import zlib

import pytest

from tests.context.parse.dialects import DIALECTS, Dialect, mutated, reply, tools_of

CONVERSATIONS, MUTATIONS = 200, 2_000
"""Of each dialect, shared by its templates."""
each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.template)


def share(dialect: Dialect, whole: int) -> int:
    return -(-whole // sum(other.parser == dialect.parser for other in DIALECTS))


def chance_of(dialect: Dialect, seed: int) -> random.Random:
    return random.Random(zlib.crc32(dialect.template.encode()) + seed)


@each_dialect
def test_calls_are_read_back_as_they_were_written(dialect: Dialect) -> None:
    chance = chance_of(dialect, 1)
    for _ in range(share(dialect, CONVERSATIONS)):
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


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")  # escapes that Python doubts
@each_dialect
def test_mutated_calls_have_an_outcome(dialect: Dialect) -> None:
    chance = chance_of(dialect, 2)
    rows = [reply(dialect, chance) for _ in range(100)]
    texts = [(dialect.parse(tools_of(row)), dialect.written(row)) for row in rows]
    outcomes = set()
    for n in range(share(dialect, MUTATIONS)):
        parser, text = texts[n % len(texts)]
        text = mutated(text, chance)
        read = parser.parse(text, stopped=True)
        outcomes.add(read.outcome)
        assert (read.outcome == "malformed") == (read.problem is not None)
        assert (read.outcome == "tool_calls") == bool(read.message.tool_calls)
        read.message.content.encode()
        json.dumps([(call.name, dict(call.arguments), call.id) for call in read.message.tool_calls], allow_nan=False)
    assert outcomes == {"final", "tool_calls", "malformed"}
