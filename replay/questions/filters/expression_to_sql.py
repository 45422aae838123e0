"""Translates a filter, written as a Python expression, to an SQL condition over the table `trajectories`.

    success and 0.5 < reward <= 1 and (num_turns >= 2 or error_kind is not None) and 'drawer' in text

`ast` parses the filter; nothing is evaluated. This module lists the forms that are allowed. Every comparison
is true or false, never NULL: None equals nothing and is neither greater nor smaller than anything. So
`error_kind != 'timeout'` holds for a row without errors. The result is the same on SQLite and PostgreSQL.

Both databases compare text by its bytes, and case matters. A text that no database can hold as it is (see `ExactText`)
is stored as JSON. `==` and `in [...]` are exact for such a text too; a search within it looks at the JSON.
"""

import ast
import json
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import sqlalchemy as sa

from context.wording import excerpt, suggest
from replay.errors import ReplayError
from replay.questions.filters.fields import FIELDS, Field, FieldKind
from replay.questions.filters.payload_fields import as_number, is_one_of, payload_name, payload_path, payload_value
from replay.storage.format.column_types import ExactText, is_storable
from replay.storage.format.schema import groups, messages, nodes, tasks, trajectories, trajectory_labels
from replay.storage.statements import spelled

_LONGEST = 3_000
"""Characters of all filters together: SQLite takes expressions of depth 1,000."""
_DEEPEST = 50
_LONGEST_QUOTE = 40

_FEW_NEEDLES = 50
Value = float | int | bool | str
Known = Mapping[str, sa.ColumnElement[Any]]
"""Expressions in place of the fields' own, by the fields' names."""

_EQUAL = ("==", "in")
_ORDER = ("<", "<=", ">", ">=")
_SEARCH = ("contains", "startswith")
_KINDS: dict[FieldKind, tuple[tuple[str, ...], str]] = {
    FieldKind.number: ((*_EQUAL, *_ORDER, "is"), "{} > 0.5"),
    FieldKind.whole: ((*_EQUAL, *_ORDER, "is"), "{} < 8"),
    FieldKind.truth: ((*_EQUAL, "is"), "{} == True"),
    FieldKind.text: ((*_EQUAL, *_SEARCH, "is"), "{} == 'name'"),
    FieldKind.word: ((*_EQUAL, "is"), "{} == 'raised'"),
    FieldKind.messages: ((*_EQUAL, *_SEARCH), "'words' in {}"),
    FieldKind.calls: (_EQUAL, "{} == 'lookup'"),
    FieldKind.requests: (_EQUAL, "{} == 'planner'"),
    FieldKind.labels: ((*_EQUAL, "is"), "{} == 'good'"),
    FieldKind.notes: ((*_EQUAL, *_SEARCH, "is"), "'words' in {}"),
    FieldKind.payload: ((*_EQUAL, *_ORDER, "is"), "{} == 2"),
}
"""For each kind, the signs that it may be compared by, and an example."""
_SHOWN = {
    "==": "==, !=",
    "in": "in [...]",
    "is": "is None",
    "contains": "'...' in {}",
    "startswith": "{}.startswith('...')",
}
_OPERATORS: dict[type[ast.cmpop], tuple[str, bool]] = {
    ast.Eq: ("==", True),
    ast.NotEq: ("==", False),
    ast.Lt: ("<", True),
    ast.LtE: ("<=", True),
    ast.Gt: (">", True),
    ast.GtE: (">=", True),
    ast.In: ("in", True),
    ast.NotIn: ("in", False),
    ast.Is: ("is", True),
    ast.IsNot: ("is", False),
}
_FIELD_ON_THE_RIGHT = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "in": "contains"}

_UNWRITABLE = re.compile("[\0\r\n\ud800-\udfff]")
_ONE_TEXT = re.compile(r"""[rRuU]?('([^'\\]|\\.)*'|"([^"\\]|\\.)*")""")
_FILE = "<filter>"
warnings.filterwarnings("ignore", module=_FILE)  # An unknown escape such as '\d' is no mistake of the user.


class WrongFilter(ReplayError):
    """A filter that can't be read. The message quotes the wrong part."""


@dataclass(frozen=True)
class SplitCondition:
    """A condition in two parts. The part about messages takes a thousand times as long as the other."""

    columns: sa.ColumnElement[bool]
    messages: sa.ColumnElement[bool] | None
    """None: the filter does not ask about messages."""


def condition(text: str) -> sa.ColumnElement[bool]:
    """Translate one filter for a query over the table `trajectories`. Raises WrongFilter."""
    found = conditions([text])
    return found.columns if found.messages is None else sa.and_(found.columns, found.messages)


def conditions(texts: Iterable[str], *, known: Known | None = None) -> SplitCondition:
    """Translate filters that must all hold. `known` has expressions in place of fields' own. Raises WrongFilter."""
    given = list(texts)
    if (length := sum(map(len, given))) > _LONGEST:
        raise WrongFilter(f"where must have at most {_LONGEST:,} characters in all, got {length:,}. Shorten it.")
    columns: list[sa.ColumnElement[bool]] = []
    messages: list[sa.ColumnElement[bool]] = []
    for filter in (_Filter(text, known or {}) for text in given):
        for part in _all_parts(filter.tree):
            (messages if _asks_messages(part) else columns).append(filter.condition(part))
    return SplitCondition(sa.and_(sa.true(), *columns), sa.and_(*messages) if messages else None)


def _all_parts(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        for part in node.values:
            yield from _all_parts(part)
    else:
        yield node


def _asks_messages(node: ast.expr) -> bool:
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return any(FIELDS[name].kind in (FieldKind.messages, FieldKind.calls) for name in names & FIELDS.keys())


class _Filter:
    def __init__(self, text: str, known: Known) -> None:
        self._text = text.strip()
        self._known = known
        if odd := _UNWRITABLE.search(self._text):
            advice = f"Leave it out, or write {ascii(odd[0])[1:-1]} between quotes."
            raise _wrong("hold such a character as an escape", odd[0], advice)
        try:
            self.tree = ast.parse(self._text, _FILE, "eval").body
        except SyntaxError as error:
            rest = self._text[error.offset - 1 :] if error.offset else ""
            advice = f"Python says: {error.msg}. For example: {_example()}"
            raise _wrong("be a Python expression", rest, advice) from None
        except (MemoryError, RecursionError):
            raise _too_deep() from None

    def condition(self, node: ast.expr, depth: int = 0) -> sa.ColumnElement[bool]:
        if depth > _DEEPEST:
            raise _too_deep()
        match node:
            case ast.BoolOp(op=op, values=parts):
                join = sa.and_ if isinstance(op, ast.And) else sa.or_
                return join(*(self.condition(part, depth + 1) for part in parts))
            case ast.UnaryOp(op=ast.Not(), operand=part):
                return sa.not_(self.condition(part, depth + 1).self_group())
            case ast.Compare(left=left, ops=operators, comparators=others):
                pairs = zip(operators, pairwise([left, *others]), strict=True)
                return sa.and_(*(self._compare_sides(node, operator, *sides) for operator, sides in pairs))
            case ast.Call(func=ast.Attribute(value=owner, attr="startswith"), args=[text], keywords=[]):
                return self._compare(node, self._field(owner), "startswith", text)
            case ast.Name():
                field = self._field(node)
                if field.kind is FieldKind.truth:
                    return compare_field(field, "==", [True], self._known)
                raise self._wrong_node(f"compare {field.name}", node, f"For example: {_example(field)}")
        raise self._wrong_node("compare a field here", node, f"For example: {_example()}")

    def _compare_sides(
        self, whole: ast.expr, operator: ast.cmpop, left: ast.expr, right: ast.expr
    ) -> sa.ColumnElement[bool]:
        sign, is_so = _OPERATORS[type(operator)]
        if not isinstance(left, ast.Name | ast.Subscript):
            left, sign, right = right, _FIELD_ON_THE_RIGHT.get(sign, sign), left
        holds = self._compare(whole, self._field(left), sign, right)
        return holds if is_so else sa.not_(holds)

    def _compare(self, whole: ast.expr, field: Field, sign: str, value: ast.expr) -> sa.ColumnElement[bool]:
        signs, _ = _KINDS[field.kind]
        if sign not in signs:
            shown = ", ".join(_SHOWN.get(known, known).format(field.name) for known in signs)
            raise self._wrong_node(f"compare {field.name} by {shown}", whole)
        nodes = [value]
        if sign == "is":
            if not _is_none(value):
                raise self._wrong_node("have None behind `is`", value, f"For example: {_example(field)}")
            nodes = []
        elif sign == "in":
            if not isinstance(value, ast.List | ast.Tuple) or not value.elts:
                example = _example(field).partition(" == ")[2] or "1"
                advice = f"For example: {field.name} in [{example}]"
                raise self._wrong_node(f"look for {field.name} in a list", value, advice)
            nodes = value.elts
        is_number = field.kind is FieldKind.payload and sign in _ORDER
        asked = replace(field, kind=FieldKind.number) if is_number else field
        values = [self._value(node, asked, is_choice=sign not in _SEARCH) for node in nodes]
        return compare_field(field, sign, values, self._known)

    def _field(self, node: ast.expr) -> Field:
        if isinstance(node, ast.Name) and node.id in FIELDS:
            return FIELDS[node.id]
        if path := payload_path(node):
            return Field(payload_name(path), FieldKind.payload, "a field of its task", payload_value(path))
        advice = suggest(node.id if isinstance(node, ast.Name) else "", [*FIELDS, "payload['NAME']"])
        raise self._wrong_node("name a field here", node, advice)

    def _value(self, node: ast.expr, field: Field, *, is_choice: bool) -> Value:
        match node:
            case ast.Constant(value=str()) if not _ONE_TEXT.fullmatch(self._source(node)):
                raise self._wrong_node("have one text between two quotes", node, r"Write a quote within as \' or \".")
            case ast.Constant(value=given):
                value = _value_of_kind(given, field.kind)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as given)):
                value = _value_of_kind(-given, field.kind)
            case _:
                value = None
        if value is None:
            advice = f"Use `{field.name} is None`." if _is_none(node) else f"For example: {_example(field)}"
            raise self._wrong_node(f"compare {field.name} with {field.kind.value}", node, advice)
        if is_choice and field.choices and value not in field.choices:
            raise self._wrong_node(f"compare {field.name} with one of {', '.join(field.choices)}", node)
        return value

    def _source(self, node: ast.expr) -> str:
        return ast.get_source_segment(self._text, node) or ""

    def _wrong_node(self, rule: str, node: ast.expr, advice: str = "") -> WrongFilter:
        return _wrong(rule, self._source(node), advice)


def _wrong(rule: str, source: str, advice: str) -> WrongFilter:
    got = repr(excerpt(source, _LONGEST_QUOTE)) if source else "its end"
    return WrongFilter(f"where must {rule}, got {got}. {advice}".rstrip())


def _too_deep() -> WrongFilter:
    return WrongFilter(f"where must nest at most {_DEEPEST} deep, got more. Leave some of it out.")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _value_of_kind(value: Any, kind: FieldKind) -> Value | None:
    """Convert the value to this kind. None: the value is of another kind."""
    if kind is FieldKind.truth:
        return value if isinstance(value, bool) else None
    if kind is FieldKind.payload and isinstance(value, bool | str):
        return value
    if kind not in (FieldKind.number, FieldKind.whole, FieldKind.payload):
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
        return None
    if kind is FieldKind.number:
        return float(value)
    if kind is FieldKind.payload:
        return value
    return int(value) if int(value) == value and -(2**63) <= value < 2**63 else None


def _example(field: Field | None = None) -> str:
    if field is None:
        return "reward > 0.5 and 'words' in text"
    return f"{field.name} == '{field.choices[0]}'" if field.choices else _KINDS[field.kind][1].format(field.name)


_NAMED_BY: dict[sa.FromClause, tuple[sa.Column[str], sa.Column[str]]] = {
    groups: (trajectories.c.group, groups.c.id),
    nodes: (trajectories.c.id, nodes.c.trajectory),
    trajectory_labels: (trajectories.c.id, trajectory_labels.c.trajectory),
}
"""For each other table, the columns that join trajectories with it."""


def compare_field(field: Field, sign: str, values: Sequence[Value], known: Known) -> sa.ColumnElement[bool]:
    """Return the condition that a field compares to `values` by `sign`. The condition is true or false, never NULL.

    `sign` is one of == < <= > >= in contains startswith, or `is` for a comparison with None, which has no values.
    `known` has expressions in place of fields' own.
    """
    if field.kind is FieldKind.messages:
        parts = (_Part(sa.literal_column(name)) for name in ("'content'", "'reasoning'"))
        says = sa.or_(*(_holds(part, sign, values) for part in parts))
        return _exists_message(says, [form for text in map(str, values) for form in (text, json.dumps(text)[1:-1])])
    if field.kind is FieldKind.calls:
        # The JSON of a call begins with its name.
        begins = [json.dumps({"name": value}, separators=(",", ":"))[:-1] + "," for value in values]
        calls = sa.or_(*(_starts(_Call(), begin) for begin in begins))
        return _exists_message(_AnyCall(_Part(sa.literal_column("'tool_calls'")), calls), begins)
    if field.elsewhere is not None:
        # The database finds the fitting groups, nodes or labels once, and does not look them up for every row.
        mine, theirs = _NAMED_BY[field.elsewhere.table]
        holds = field.elsewhere.is_not(None) if sign == "is" else _holds(field.elsewhere, sign, values)
        some = mine.in_(sa.select(theirs).where(holds))
        return sa.not_(some) if sign == "is" else some
    expression = known.get(field.name, field.expression)
    assert expression is not None
    if field.kind is FieldKind.payload:
        fits = _holds_json(expression, sign, values)
        return trajectories.c.task.in_(sa.select(tasks.c.hash).where(fits))
    if field.kind is FieldKind.word and sign != "is":
        among = sa.literal(" ").concat(expression).concat(" ")
        holds = sa.or_(*(_holds(among, "contains", [f" {value} "]) for value in values))
    else:
        holds = _holds(expression, sign, values)
    return sa.and_(expression.is_not(None), holds) if field.may_be_unknown and sign != "is" else holds


def _exists_message(says: sa.ColumnElement[bool], needles: Sequence[str]) -> sa.ColumnElement[bool]:
    """Return the condition that `says` is true for some message of a row.

    If there are few needles, only conversations that contain one of them are split into messages. Searching the text of
    the whole conversation takes a tenth of the time of splitting it.
    """
    mine = messages.c.trajectory == trajectories.c.id
    in_json = {json.dumps(needle, ensure_ascii=False)[1:-1] for needle in needles if is_storable(needle)}
    found = (_contains(_Plain(messages.c.said), needle) for needle in sorted(in_json))
    likely = sa.or_(*found) if 0 < len(in_json) <= _FEW_NEEDLES else sa.true()
    return sa.exists().where(mine, likely, _AnyMessage(messages.c.said, says)).correlate(trajectories)


def _holds(expression: sa.ColumnElement[Any], sign: str, values: Sequence[Value]) -> sa.ColumnElement[bool]:
    if sign == "is":
        return expression.is_(None)
    if sign == "in":
        return expression.in_(values)
    if sign in _SEARCHES:
        value = str(values[0])
        stored = value if is_storable(value) else json.dumps(value)[1:-1]
        return _SEARCHES[sign](sa.type_coerce(expression, sa.Text), stored)
    return _COMPARISONS[sign](expression, values[0])


def _holds_json(value: sa.ColumnElement[str], sign: str, values: Sequence[Value]) -> sa.ColumnElement[bool]:
    if sign == "is":
        return sa.func.coalesce(value, "null") == "null"
    return is_one_of(value, values) if sign in _EQUAL else _COMPARISONS[sign](as_number(value), values[0])


def _contains(text: sa.ColumnElement[Any], part: str) -> sa.ColumnElement[bool]:
    return _Position(text, sa.bindparam(None, part, sa.Text)) > 0


def _starts(text: sa.ColumnElement[Any], part: str) -> sa.ColumnElement[bool]:
    return sa.func.substr(text, 1, len(part)) == sa.bindparam(None, part, sa.Text)


_SEARCHES = {"contains": _contains, "startswith": _starts}
_COMPARISONS: dict[str, Callable[[sa.ColumnElement[Any], Any], sa.ColumnElement[bool]]] = {
    "==": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


_AnyMessage = spelled(
    sa.Boolean(),
    sqlite="EXISTS (SELECT 1 FROM json_each(plain_text({})) AS message WHERE {})",
    postgresql="EXISTS (SELECT 1 FROM json_array_elements(CAST({} AS json)) AS message(value) WHERE {})",
)
"""(messages of a trajectory as they are stored, condition on the parts of one of them)"""
_Plain = spelled(sa.Text(), sqlite="plain_text({})", postgresql="{}")
"""(messages of a trajectory as they are stored): the JSON."""
_Part = spelled(ExactText(), sqlite="json_extract(message.value, '$.' || {})", postgresql="(message.value ->> {})")
"""(name): a part of the current message. NULL: the message has no such part."""
_AnyCall = spelled(
    sa.Boolean(),
    sqlite="EXISTS (SELECT 1 FROM json_each({}) AS called WHERE {})",
    postgresql="EXISTS (SELECT 1 FROM json_array_elements(CAST({} AS json)) AS called(value) WHERE {})",
)
"""(tool calls as JSON, condition on one of them). Calls are compared as JSON, which every database can hold."""
_Call = spelled(sa.Text(), sqlite="called.value", postgresql="CAST(called.value AS text)")
"""The current call as JSON."""
_Position = spelled(sa.Integer(), sqlite="instr({}, {})", postgresql="strpos({}, {})")
"""(text, part): the position of the part in the text, from 1. 0: the text lacks the part."""
