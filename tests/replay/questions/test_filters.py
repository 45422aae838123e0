"""Filters against Python itself: what SQL finds is what `eval` of the same expression finds."""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from context import default_authors
from context.messages import Message, ToolCall
from context.tokens.session_nodes import Fork, Node, Place, Status
from context.tokens.token_sequence import Segment, TokenSequence
from replay import ReplayStore
from replay.questions.filters import FIELDS, WrongFilter, condition
from replay.questions.filters.fields import Field, FieldKind
from replay.storage.format.column_types import ESCAPE, is_storable, to_storable
from replay.storage.format.schema import trajectories
from replay.storage.validate import summarised
from tests.fakes.records import LLM, RUN, a_run, add_draw, policy, put, tokens, trajectory

KINDS = ("raised", "timeout", "raised", "not_text")
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
    "x" * 100,
    "%_" * 50,
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
        error_kinds=" ".join(KINDS[: 1 + index % 4]) if index % 2 else None,
        mean_entropy=index / 10 if index % 4 else None,
        source=("self", "teacher", "import")[index % 3],
    )
    calls = (ToolCall(other, {"name": odd, "list": [{"name": "nested"}, 1]}), ToolCall("lookup", {}))
    said = (Message("user", odd), Message("assistant", "", reasoning=other, tool_calls=calls[: index % 3]))
    return replace(record, messages=said, nodes=session(index, odd, record.segments[0].tokens) if index % 2 else ())


def session(index: int, agent: str, said: TokenSequence) -> tuple[Node, ...]:
    """Two requests, of which the second shares nothing with the first, and no reply."""
    agents, again = (agent, ODD[(index + 1) % len(ODD)]), [*Fork, None][index % 8]
    first = Node(0, Place(None, 0, 0, "", Fork.NEW), said, len(said), (), Status.TRAINED, agents[0])
    return first, Node(1, Place(0, 0, 0, "", again), said.part(0, 0), 0, (), Status.REFUSED, agents[1])


ROWS = summarised([row(index) for index in range(2 * len(ODD))], default_authors())


@pytest.fixture(scope="module")
def odd_rows(module_store: ReplayStore) -> ReplayStore:
    store = module_store
    store.add_run(a_run(RUN_2))
    store.add_policy(policy(NEWEST))
    for index, each in enumerate(ROWS):
        put(store, each, size=1 + index % 4)
        # The last one that counts, which was used by two runs, stands between an earlier and a reserved one.
        draws = [(RUN, 1, "committed", 0.5), (RUN_2, 2, "committed", 9.0), (RUN, 2, "committed", drift(index))]
        for run, iteration, state, mean in draws if index % 3 else []:
            used = {"run": run, "iteration": iteration, "slot": index, "state": state}
            add_draw(store, to_storable(each.id), **used, mean=mean, largest=None if mean is None else 2 * mean)
        add_draw(store, to_storable(each.id), iteration=3, slot=index, state="reserved")
        for label, note in labels_of(each).items():
            store.labels.add([each.id], label, note)
    return store


def labels_of(row: Any) -> dict[str, str | None]:
    """Notes by label: none, one or two."""
    index = ROWS.index(row)
    odd = ODD[index % len(ODD)]
    return dict([("good", odd if is_storable(odd) else None), ("bad", "a second note")][: index % 3])


def drift(index: int) -> float | None:
    """The mean one in the update that used a row last: not known of every row that was used."""
    return index / 4 if index % 3 and index % 5 else None


def found(store: ReplayStore, text: str) -> list[str]:
    with store.reading() as connection:
        query = sa.select(trajectories.c.id).where(condition(text)).order_by(trajectories.c.slot)
        return list(connection.scalars(query))


class Unknown:
    """None in a filter: it equals nothing, is neither greater nor smaller than anything, and holds no text."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False

    def __lt__(self, other: object) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __contains__ = startswith = __lt__


class Escaped(str):
    """A text that a database can't hold as it is: it is stored, and searched, as JSON."""

    def __contains__(self, part: str) -> bool:  # type: ignore[override]
        return searched(part) in ESCAPE + json.dumps(self)

    def startswith(self, part: str) -> bool:  # type: ignore[override]
        return (ESCAPE + json.dumps(self)).startswith(searched(part))


def searched(part: str) -> str:
    return part if is_storable(part) else json.dumps(part)[1:-1]


class AnyOf(list[str]):
    """What was said in a row, or the tools it called: a comparison holds where it does of one of them."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return any(each == other for each in self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, part: object) -> bool:
        return any(str(part) in each for each in self)

    def startswith(self, part: str) -> bool:
        return any(each.startswith(part) for each in self)


UNKNOWN = Unknown()
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "uses": lambda row: 0,
    "error_kind": lambda row: row.record.error_kinds and AnyOf(row.record.error_kinds.split()),
    "num_tool_errors": lambda row: len((row.record.error_kinds or "").split()),
    "staleness": lambda row: (
        None if (row.record.run, row.record.source) != (RUN, "self") else NEWEST - row.record.policy_version_min
    ),
    "drift": lambda row: drift(ROWS.index(row)),
    "token_gap_max": lambda row: None if drift(ROWS.index(row)) is None else 2 * (drift(ROWS.index(row)) or 0.0),
    "group_size": lambda row: 1 + ROWS.index(row) % 4,
    "group_success": lambda row: 0.5,
    "group_reward": lambda row: 0.5,
    "state_reason": lambda row: None,
    "text": lambda row: AnyOf(as_stored(text) for said in row.messages for text in (said.content, said.reasoning)),
    "agent": lambda row: AnyOf(node.agent for node in row.nodes),
    "fork": lambda row: AnyOf(node.place.fork for node in row.nodes if node.place.fork),
    "label": lambda row: AnyOf(labels_of(row)) or None,
    "note": lambda row: AnyOf(note for note in labels_of(row).values() if note is not None) or None,
    "reply": lambda row: AnyOf(node.status for node in row.nodes),
    "tool": lambda row: AnyOf(call.name for said in row.messages for call in said.tool_calls),
}


def as_stored(value: Any) -> Any:
    if value is None:
        return UNKNOWN
    return Escaped(value) if isinstance(value, str) and not is_storable(value) else value


def value_of(row: Any, of: str) -> Any:
    return as_stored(COMPUTED[of](row) if of in COMPUTED else getattr(row.record, "group" if of == "group_id" else of))


NAMES = sorted(set(FIELDS) - {"num_bytes"})
"""`num_bytes` is the database's own count."""
VALUES = [(row.id, {name: value_of(row, name) for name in NAMES} | {"unknown": UNKNOWN}) for row in ROWS]


class NoneIsUnknown(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.copy_location(ast.Name("unknown", ast.Load()), node) if node.value is None else node


def found_by_python(text: str) -> list[str]:
    expression = compile(NoneIsUnknown().visit(ast.parse(text, mode="eval")), "<test>", "eval")
    return [id for id, values in VALUES if eval(expression, {}, values)]  # noqa: S307  the test's own


texts = st.one_of(
    st.sampled_from(ODD),
    st.sampled_from(ODD).map(lambda text: text[1:9]),
    st.sampled_from(ODD).map(lambda text: text[:3]),
    st.sampled_from(["lookup", "nested", "self", RUN, RUN_2, "g7", "01-"]),
    st.text(st.sampled_from("ab'\"%_\\[]*?;-\x00\ud83d😀\n:$"), max_size=6),
    st.text(max_size=8),
)
numbers = st.one_of(
    st.sampled_from([0.0, -0.5, 0.5, 1.0, 1.5, 2.0]),
    st.integers(-3, 3),
    st.floats(allow_nan=False, allow_infinity=False),
)
wholes = st.one_of(st.integers(-1, 8), st.sampled_from([0.0, 2.0, -1.0]), st.integers(-(2**63), 2**63 - 1))
LITERALS: dict[FieldKind, st.SearchStrategy[Any]] = {
    FieldKind.number: numbers,
    FieldKind.whole: wholes,
    FieldKind.truth: st.booleans(),
    FieldKind.text: texts,
    FieldKind.word: st.one_of(st.sampled_from([*KINDS, "aised"]), texts),
    FieldKind.messages: texts,
    FieldKind.calls: texts,
    FieldKind.requests: texts,
    FieldKind.labels: st.one_of(st.sampled_from(["good", "bad"]), texts),
    FieldKind.notes: texts,
}


@st.composite
def comparisons(draw: st.DrawFn) -> str:
    field = FIELDS[draw(st.sampled_from(NAMES))]
    values = st.sampled_from(field.choices) if field.choices else LITERALS[field.kind]
    name, one, two, text = field.name, repr(draw(values)), repr(draw(values)), repr(draw(texts))
    sign, other = (draw(st.sampled_from(["<", "<=", ">", ">="])) for _ in range(2))
    forms = {
        "equality": [f"{name} == {one}", f"{one} == {name}", f"{name} != {one}", f"{one} != {name}"],
        "membership": [f"{name} in [{one}, {two}]", f"{name} not in [{one}]", f"{name} in ({one},)"],
        "order": [f"{one} {sign} {name} {other} {two}", f"{one} {sign} {name}", f"{name} {sign} {one}"],
        "none": [f"{name} is None", f"{name} is not None"],
        "search": [f"{text} in {name}", f"{text} not in {name}", f"{name}.startswith({text})"],
        "bare": [name],
    }
    return draw(st.sampled_from([form for kind in FORMS[field.kind] for form in forms[kind]]))


FORMS = {
    FieldKind.number: ("equality", "membership", "order", "none"),
    FieldKind.whole: ("equality", "membership", "order", "none"),
    FieldKind.truth: ("equality", "membership", "none", "bare"),
    FieldKind.text: ("equality", "membership", "search", "none"),
    FieldKind.word: ("equality", "membership", "none"),
    FieldKind.messages: ("equality", "membership", "search"),
    FieldKind.calls: ("equality", "membership"),
    FieldKind.requests: ("equality", "membership"),
    FieldKind.labels: ("equality", "membership", "none"),
    FieldKind.notes: ("equality", "membership", "search", "none"),
}


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(parts.map("({})".format), min_size=2, max_size=3)
    return several.map(" and ".join) | several.map(" or ".join) | parts.map("not ({})".format)


@settings(deadline=None, max_examples=100)
@given(text=st.recursive(comparisons(), joined, max_leaves=5))
def test_filter_finds_what_python_finds(odd_rows: ReplayStore, text: str) -> None:
    assert found(odd_rows, text) == found_by_python(text)


@pytest.mark.parametrize(
    "text",
    [
        "-1 < num_turns <= 3 > num_turns",
        "success and not error_kind is None or 5. <= reward",
        "-.5e0 < advantage",
        r"task == u'plain' or task == '\x50LAIN' or task == r'nothing\d'",
        "  success  # of any run",
        "(success and\tnum_turns > 1)",
        "fork == 'thinking' and reply == 'refused' and agent != 'PLAIN'",
        "label == 'good' and label != 'bad' and note is not None and '%' not in note",
        "label is None and 'a' not in note",
        "error_kind != 'raised' and 'x' not in state_reason",
    ],
)
def test_forms_of_python_are_read(odd_rows: ReplayStore, text: str) -> None:
    assert found(odd_rows, text) == found_by_python(text.strip()) != []


@settings(deadline=None)
@given(
    text=st.text(max_size=30)
    | st.lists(
        st.sampled_from(
            re.split(" ", "reward task success text ( ) [ ] and or not == = 'a' 1 in , is None null ; -- lambda : .")
            + re.split(" ", "startswith if else for * f'{reward}' like contains")
        )
    ).map(" ".join)
)
def test_any_text_is_a_filter_or_refused_in_one_line(text: str) -> None:
    try:
        condition(text)
    except WrongFilter as error:
        assert str(error).startswith("where must ")
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rewrd > 0.5", "name a field here, got 'rewrd'. Did you mean reward?"),
        ("reward > 'high'", "compare reward with a number, got \"'high'\". For example: reward > 0.5"),
        ("num_turns > 2.5", "compare num_turns with a whole number, got '2.5'. For example: num_turns < 8"),
        ("success > True", "compare success by ==, !=, in [...], is None, got 'success > True'."),
        ("task < 'a'", "compare task by ==, !=, in [...], '...' in task, task.startswith('...'), is None, got"),
        ("task == None", "compare task with a text in quotes, got 'None'. Use `task is None`."),
        ("error_kind is 'timeout'", "have None behind `is`, got \"'timeout'\". For example: error_kind == 'raised'"),
        ("state == 'elligible'", "compare state with one of eligible, untrainable, orphaned, quarantined, evicted"),
        ("task == 'a' 'b'", "have one text between two quotes, got \"'a' 'b'\"."),
        ("task == 'plain", 'be a Python expression, got "\'plain". Python says: unterminated string'),
        ("reward", "compare reward, got 'reward'. For example: reward > 0.5"),
        ("success and 5", "compare a field here, got '5'. For example: reward > 0.5 and 'words' in text"),
        ("__import__('os').system('ls')", "compare a field here, got \"__import__('os').system('ls')\"."),
        ("task.upper() == 'A'", "name a field here, got \"'A'\"."),
        ("payload == 2", "name a field here, got 'payload'. Did you mean payload['NAME']?"),
        ("payload['a'] < 'x'", "compare payload['a'] with a number, got \"'x'\". For example: payload['a'] > 0.5"),
        ("uses in []", "look for uses in a list, got '[]'. For example: uses in [1]"),
        ("task == 'a\nb'", r"hold such a character as an escape, got '\n'. Leave it out, or write \n bet"),
        ("not " * 60 + "success", "nest at most 50 deep"),
        ("'" + "x" * 3_000 + "' in text", "have at most 3,000 characters in all, got 3,010. Shorten it."),
    ],
)
def test_what_cannot_be_read_is_quoted(text: str, message: str) -> None:
    with pytest.raises(WrongFilter, match=re.escape(f"where must {message}")):
        condition(text)


def test_bytes_are_those_of_the_stored_row(odd_rows: ReplayStore) -> None:
    with odd_rows.reading() as connection:
        sizes = connection.execute(sa.select(trajectories.c.id, trajectories.c.num_bytes)).all()
    least = min(size for _, size in sizes)
    assert set(found(odd_rows, f"num_bytes <= {least}")) == {id for id, size in sizes if size == least}


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "replay.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(\w+)` \| ([^|;]+?)(; may be unknown)? \| ([^|:]+?)(?:: [a-z, .]+)? \|$", text, re.M)
    assert told == [
        (field.name, field.kind.value, "; may be unknown" * may_be_unknown(field), field.meaning.partition(":")[0])
        for field in FIELDS.values()
    ]


def may_be_unknown(field: Field) -> bool:
    return field.expression is not None and field.may_be_unknown
