from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from context.messages import Message, ToolCall
from context.tokens.token_sequence import Segment
from replay import ReplayStore
from replay.queries.filters import FIELDS, WrongFilter, condition, conditions, parsed
from replay.queries.filters.fields import Kind
from replay.queries.filters.grammar import All, AnyOf, Comparison, Node, Not
from replay.storage.format.column_types import is_storable
from replay.storage.format.schema import trajectories
from tests.replay.asking import listed
from tests.replay.fakes import LLM, RUN, group, new_store, policy, run_record, task, tokens, trajectory
from tests.replay.locations import Databases

ODD = (
    "plain",
    "'; drop table trajectories; --",
    '"quoted" and ""doubled""',
    "100%_done\\",
    "[a-z]*?",
    "NUL \x00 within",
    'NUL \x00, a\nbreak, a "quote", 鍵',
    "half \ud83d of a pair",
    "whole 😀 of it",
    "\ue000json:",
    ":name %(name)s ? $1 {x}",
    "line\nbreak\ttab",
    "PLAIN",
    "",
    "x" * 10_000,
    "%_" * 5_000,
)
RUN_2 = "run-2"
NEWEST = 5
"""Policy of the first run; the second has published nothing."""


def row(index: int) -> Any:
    odd = ODD[index % len(ODD)]
    other = ODD[(index * 7 + 3) % len(ODD)]
    record = trajectory(
        f"{index:02d}-{odd[:20]}",
        segments=(Segment(tokens([5] * (1 + index % 4), [LLM] * (1 + index % 4), version=index % 6)),),
        run=RUN if index % 5 else RUN_2,
        group=f"g{index}",
        task=odd,
        slot=index,
        iteration=1 + index % 3,
        reward=index / 8 - 1,
        success=index % 3 == 0,
        advantage=-0.5 + index % 4,
        num_turns=index % 7,
        num_tool_calls=index % 3,
        error_kind=other if index % 2 else None,
        mean_entropy=index / 10 if index % 4 else None,
        source=("self", "teacher", "import")[index % 3],
    )
    calls = (ToolCall(other, {"name": odd, "list": [{"name": "nested"}, 1]}), ToolCall("lookup", {}))
    said = (
        Message("user", odd),
        Message("assistant", "", reasoning=other, tool_calls=calls[: index % 3]),
    )
    return replace(record, messages=said)


ROWS = [row(index) for index in range(2 * len(ODD))]


@pytest.fixture(scope="module")
def store(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    store = new_store(databases.new(tmp_path_factory.mktemp("where") / "replay.sqlite"))
    store.add_run(run_record(RUN_2))
    store.add_policy(policy(NEWEST))
    groups = [
        group(r.record.group, run=r.record.run, task=r.record.task, iteration=r.record.iteration, size=1 + i % 4)
        for i, r in enumerate(ROWS)
    ]
    store.append([task(odd) for odd in ODD], groups, ROWS)
    yield store
    store.close()


def found(store: ReplayStore, text: str) -> list[str]:
    with store.reading() as connection:
        query = sa.select(trajectories.c.id).where(condition(text)).order_by(trajectories.c.slot)
        return list(connection.scalars(query))


ATTRIBUTES = {
    "turns": "num_turns",
    "tools": "num_tool_calls",
    "tokens": "num_tokens",
    "action_tokens": "num_action_tokens",
    "entropy": "mean_entropy",
    "log_prob": "mean_behavior_log_prob",
    "policy_version": "policy_version_min",
    "error": "error_kind",
}
TOLD = {
    "uses": lambda row: 0,
    "staleness": lambda row: None if row.record.run == RUN_2 else NEWEST - row.record.policy_version_min,
    "group_size": lambda row: 1 + ROWS.index(row) % 4,
    "group_success": lambda row: 0.5,
    "group_reward": lambda row: 0.5,
    "state_reason": lambda row: None,
    "text": lambda row: [text for said in row.messages for text in (said.content, said.reasoning)],
    "tool": lambda row: [call.name for said in row.messages for call in said.tool_calls],
}
SIGNS = {"=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def told(row: Any, name: str) -> Any:
    return TOLD[name](row) if name in TOLD else getattr(row.record, ATTRIBUTES.get(name, name))


def holds(node: Node, row: Any) -> bool:
    """The filter as anybody would write it in Python."""
    if isinstance(node, Not):
        return not holds(node.part, row)
    if isinstance(node, All):
        return all(holds(part, row) for part in node.parts)
    if isinstance(node, AnyOf):
        return any(holds(part, row) for part in node.parts)
    value = told(row, node.field.name)
    return any(compares(node, one) for one in (value if isinstance(value, list) else [value]))


def compares(node: Comparison, value: Any) -> bool:
    if node.sign == "null":
        return value is None
    if value is None:
        return False
    if node.sign == "in":
        return value in node.values
    if node.sign in SIGNS:
        return bool(SIGNS[node.sign](value, node.values[0]))
    # What a database can't hold as it is is stored, and searched, as JSON.
    stored = str if is_storable(value) else lambda text: json.dumps(text)[1:-1]
    if node.sign == "contains":
        return stored(node.values[0]) in stored(value)
    return matches(str(node.values[0]), stored(value), stored)


def matches(pattern: str, value: str, stored: Callable[[str], str]) -> bool:
    expression = ""
    for escaped, wild, other in re.findall(r"\\([%_\\])|([%_])|(.)", pattern, re.DOTALL):
        expression += {"%": ".*", "_": "."}.get(wild) or re.escape(stored(escaped or other))
    return re.fullmatch(expression, value, re.DOTALL) is not None


texts = st.one_of(
    st.sampled_from(ODD),
    st.sampled_from(ODD).map(lambda text: text[1:9]),
    st.sampled_from(["lookup", "nested", "self", RUN, RUN_2, "g7", "01-%", "%a%", "%\\_%", "_%x", "%\\"]),
    st.text(st.sampled_from("ab'\"%_\\[]*?;-\x00\ud83d😀\n:$"), max_size=6),
    st.text(max_size=8),
)
numbers = st.one_of(st.sampled_from([0.0, -0.5, 0.5, 1.0, 1.5, 2.0]), st.floats(allow_nan=False, allow_infinity=False))
wholes = st.one_of(st.integers(-1, 8), st.integers(-(2**63), 2**63 - 1))
VALUES: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.number: numbers,
    Kind.whole: wholes,
    Kind.truth: st.booleans(),
    Kind.text: texts,
    Kind.messages: texts,
    Kind.calls: texts,
}
TEXTUAL = (Kind.text, Kind.messages)


@st.composite
def comparisons(draw: st.DrawFn, names: Sequence[str] = sorted(set(FIELDS) - {"bytes"})) -> Comparison:
    """`bytes` is the database's own count."""
    field = FIELDS[draw(st.sampled_from(names))]
    values = VALUES[field.kind] if not field.choices else st.sampled_from(field.choices)
    signs = ["=", "in"]
    signs += ["like", "contains"] if field.kind in TEXTUAL else []
    signs += ["<", "<=", ">", ">="] if field.kind in (Kind.number, Kind.whole) else []
    signs += [] if field.asks_messages else ["null"]
    sign = draw(st.sampled_from(signs))
    if sign == "null":
        return Comparison(field, sign)
    return Comparison(field, sign, tuple(draw(st.lists(values, min_size=1, max_size=3 if sign == "in" else 1))))


def joined(parts: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    several = st.lists(parts, min_size=2, max_size=3).map(tuple)
    return several.map(All) | several.map(AnyOf) | parts.map(Not)


nodes: st.SearchStrategy[Node] = st.recursive(comparisons(), joined, max_leaves=5)


def written(node: Node) -> str:
    if isinstance(node, Not):
        return f"not {written(node.part)}" if isinstance(node.part, Comparison) else f"not ({written(node.part)})"
    if isinstance(node, (All, AnyOf)):
        word = " and " if isinstance(node, All) else " or "
        return word.join(f"({written(part)})" for part in node.parts)
    values = ", ".join(map(literal, node.values))
    if node.sign == "null":
        return f"{node.field.name} is null"
    return f"{node.field.name} {node.sign} {f'({values})' if node.sign == 'in' else values}"


def literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if not isinstance(value, str) else "'" + value.replace("'", "''") + "'"


@settings(deadline=None, max_examples=60)
@given(node=nodes)
def test_filter_finds_what_a_plain_filter_over_the_rows_finds(store: ReplayStore, node: Node) -> None:
    assert found(store, written(node)) == [row.id for row in ROWS if holds(node, row)]


@settings(deadline=None, max_examples=60)
@given(node=comparisons(["text", "tool"]))
def test_conversations_are_found_by_what_is_said_in_them(store: ReplayStore, node: Node) -> None:
    """They are searched as a whole before they are taken apart: nothing may be passed over."""
    assert found(store, written(node)) == [row.id for row in ROWS if holds(node, row)]


@pytest.mark.parametrize("odd", ODD, ids=ascii)
def test_every_piece_of_an_odd_text_is_found(store: ReplayStore, odd: str) -> None:
    """Also where the text is stored as JSON and the piece alone would not be."""
    for piece in {odd[at : at + 3] for at in range(len(odd))}:
        node = Comparison(FIELDS["text"], "contains", (piece,))
        assert found(store, written(node)) == [row.id for row in ROWS if holds(node, row)]


@settings(deadline=None)
@given(node=nodes)
def test_filter_reads_back_as_it_was_written(node: Node) -> None:
    assert parsed(written(node)) == node


@settings(deadline=None)
@given(
    text=st.text(max_size=30)
    | st.lists(
        st.sampled_from(["reward", "task", "(", ")", "and", "not", "=", "'a'", "1", "in", ",", "is", "null", ";", "--"])
    ).map(" ".join)
)
def test_any_text_is_a_filter_or_refused_in_one_line(text: str) -> None:
    try:
        condition(text)
    except WrongFilter as error:
        assert str(error).startswith("where must ")
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("reward>0.5 AND Staleness<8", "(reward > 0.5) and (staleness < 8)"),
        ("reward >= .5e1 or uses != 2", "(reward >= 5.0) or (not uses = 2)"),
        ("not success", "not success = true"),
        ("success and task='it''s'", "(success = true) and (task = 'it''s')"),
        ('task = "it\'s ""so"""', "task = 'it''s \"so\"'"),
        ("error is not null", "not error is null"),
        ("task not in ('a','b')", "not task in ('a', 'b')"),
        ("text not contains 'x'", "not text contains 'x'"),
        ("turns == 2.0", "turns = 2"),
        ("turns <> 2", "not turns = 2"),
        ("reward>1 and uses=0 or turns=1", "((reward > 1.0) and (uses = 0)) or (turns = 1)"),
    ],
)
def test_filters_can_be_written_shorter(text: str, same: str) -> None:
    assert parsed(text) == parsed(same)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rewrd > 0.5", "name a field here, got 'rewrd' at character 1. Did you mean reward?"),
        ("reward>0 and zzz=1", "name a field here, got 'zzz' at character 14. Fields: reward, success"),
        ("reward > 'high'", "compare reward with a number, got \"'high'\" at character 10. For example: reward > 0.5"),
        ("turns > 2.5", "compare turns with a whole number, got '2.5' at character 9. For example: turns < 8"),
        ("turns < 9223372036854775808", "compare turns with a whole number"),
        ("reward < 1e999", "compare reward with a number, got '1e999'"),
        ("success = 1", "compare success with true or false, got '1' at character 11"),
        ("success > true", "compare success by =, !=, in, got '>' at character 9."),
        ("task < 'a'", "compare task by =, !=, in, like, contains, got '<' at character 6."),
        ("tool like 'l%'", "compare tool by =, !=, in, got 'like' at character 6."),
        ("task = null", "compare task with a text in quotes, got 'null' at character 8. Use `is null`."),
        ("tool is null", "compare tool with the name of a called tool in quotes, got 'null' at character 9."),
        ("state = 'elligible'", "compare state with one of eligible, untrainable, orphaned, quarantined, evicted"),
        ("task = plain", "compare task with a text in quotes, got 'plain' at character 8."),
        ("task = 'plain", 'be made of fields, comparisons and values, got "\'plain" at character 8. Texts stand'),
        ("reward > 1 tokens < 2", "go on with `and` or `or`, got 'tokens' at character 12."),
        ("(reward > 1", "have `)` here, got its end at character 12."),
        ("reward", "compare reward, got its end at character 7. For example: reward > 0.5"),
        ("uses in ()", "compare uses with a whole number, got ')' at character 10."),
        ("", "name a field here, got its end at character 1."),
        ("task like '" + "%" * 10_001 + "'", "have patterns of at most 10000 characters"),
        ("(" * 60 + "success", "nest at most 50 deep"),
        ("not " * 60 + "success", "nest at most 50 deep"),
        (" or ".join(["success"] * 201), "hold at most 200 comparisons"),
        (f"uses in ({','.join(['1'] * 501)})", "list at most 500 values"),
        ("task = '" + "x" * 10_000 + "' and", "name a field here, got its end at character 10014."),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(WrongFilter, match=re.escape(f"where must {message}")):
        condition(text)


def test_filters_together_are_as_large_as_one() -> None:
    conditions(["success and uses > 1"] * 100)
    with pytest.raises(WrongFilter, match=r"where must hold at most 200 comparisons in all, got 202\."):
        conditions(["success and not (uses > 1 or turns > 2)"] * 67 + ["success"])


def test_largest_filters_are_answered(store: ReplayStore) -> None:
    assert found(store, " or ".join(["not (not success)"] * 100 + ["uses > 1"] * 100)) == found(store, "success")
    assert found(store, f"slot in ({','.join(map(str, range(500)))})") == [row.id for row in ROWS]
    assert found(store, "(" * 50 + "success" + ")" * 50) == found(store, "success")
    assert len(found(store, "task like '" + "x" * 9_999 + "_'")) == 2


def test_uses_and_staleness_are_those_of_the_listing(store: ReplayStore) -> None:
    for row in listed(store):
        assert row["id"] in found(store, f"uses = {row['uses']}")
        known = "is null" if row["staleness"] is None else f"= {row['staleness']}"
        assert row["id"] in found(store, f"staleness {known}")


def test_bytes_are_those_of_the_stored_row(store: ReplayStore) -> None:
    with store.reading() as connection:
        sizes = connection.execute(sa.select(trajectories.c.id, trajectories.c.num_bytes)).all()
    least = min(size for _, size in sizes)
    assert set(found(store, f"bytes <= {least}")) == {id for id, size in sizes if size == least}


def test_every_field_is_documented_with_its_kind() -> None:
    text = (Path(__file__).parents[2] / "docs" / "replay-commands.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|;]+?)(?:; may be unknown)? \|", text, re.MULTILINE))
    assert documented == {name: field.kind.value for name, field in FIELDS.items()}
