"""One comparison of a filter as an SQL condition, with the same result on SQLite and PostgreSQL.

Both databases compare text by its bytes, and case matters. A text that no database can hold as it is (see `ExactText`)
is stored as JSON: `==` and `in [...]` are exact for these too, and a search within one looks at that JSON.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from replay.questions.filters.fields import Field, FieldKind
from replay.storage.format.column_types import ExactText, is_storable
from replay.storage.format.schema import groups, messages, trajectories

_FEW_NEEDLES = 50
Value = float | int | bool | str
Known = Mapping[str, sa.ColumnElement[Any]]
"""Expressions by the names of fields."""


def compared(field: Field, sign: str, values: Sequence[Value], known: Known) -> sa.ColumnElement[bool]:
    """True or false, never NULL.

    `sign`: one of == < <= > >= in contains startswith, or `is` for a comparison with None, which has no values.
    `known`: expressions that take the place of fields' own.
    """
    if field.kind is FieldKind.messages:
        parts = (_Part(sa.literal_column(name)) for name in ("'content'", "'reasoning'"))
        says = sa.or_(*(_holds(part, sign, values) for part in parts))
        return _exists_message(says, [form for text in map(str, values) for form in (text, json.dumps(text)[1:-1])])
    if field.kind is FieldKind.calls:
        # Each call is stored with its name first: see `conversation`.
        begins = [json.dumps({"name": value}, separators=(",", ":"))[:-1] + "," for value in values]
        calls = sa.or_(*(_starts(_Call(), begin) for begin in begins))
        return _exists_message(_AnyCall(_Part(sa.literal_column("'tool_calls'")), calls), begins)
    if field.of_group is not None:
        # Groups that fit are found once, not looked up for every member.
        return trajectories.c.group.in_(sa.select(groups.c.id).where(_holds(field.of_group, sign, values)))
    expression = known.get(field.name, field.expression)
    assert expression is not None
    holds = _holds(expression, sign, values)
    return sa.and_(expression.is_not(None), holds) if field.may_be_unknown and sign != "is" else holds


def _exists_message(says: sa.ColumnElement[bool], needles: Sequence[str]) -> sa.ColumnElement[bool]:
    """`says` is asked of each message's parts; of a few needles, only where one stands somewhere in the conversation.

    To find a text in a conversation takes a tenth of the time of taking the conversation apart.
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


class _ByDialect(FunctionElement[Any]):
    """An SQL expression of some clauses that each database spells in its own way."""

    inherit_cache = True
    sqlite: str
    postgresql: str


@compiles(_ByDialect)
def _compile(element: _ByDialect, compiler: SQLCompiler, **options: Any) -> str:
    template: str = getattr(element, compiler.dialect.name)
    return template.format(*(compiler.process(clause, **options) for clause in element.clauses))


def _spelled(kind: sa.types.TypeEngine[Any], *, sqlite: str, postgresql: str) -> type[_ByDialect]:
    attributes = {"type": kind, "inherit_cache": True, "sqlite": sqlite, "postgresql": postgresql}
    return type("_Spelled", (_ByDialect,), attributes)


_AnyMessage = _spelled(
    sa.Boolean(),
    sqlite="EXISTS (SELECT 1 FROM json_each(plain_text({})) AS message WHERE {})",
    postgresql="EXISTS (SELECT 1 FROM json_array_elements(CAST({} AS json)) AS message(value) WHERE {})",
)
"""(messages of a trajectory as they are stored, condition on the parts of one of them)"""
_Plain = _spelled(sa.Text(), sqlite="plain_text({})", postgresql="{}")
"""(messages of a trajectory as they are stored): the JSON."""
_Part = _spelled(ExactText(), sqlite="json_extract(message.value, '$.' || {})", postgresql="(message.value ->> {})")
"""(name): of the message that is looked at; NULL where it has no such part."""
_AnyCall = _spelled(
    sa.Boolean(),
    sqlite="EXISTS (SELECT 1 FROM json_each({}) AS called WHERE {})",
    postgresql="EXISTS (SELECT 1 FROM json_array_elements(CAST({} AS json)) AS called(value) WHERE {})",
)
"""(tool calls as JSON, condition on one of them): calls are compared as the JSON that was written, in which no text is
too odd for a database to look at."""
_Call = _spelled(sa.Text(), sqlite="called.value", postgresql="CAST(called.value AS text)")
"""The call that is looked at, as JSON."""
_Position = _spelled(sa.Integer(), sqlite="instr({}, {})", postgresql="strpos({}, {})")
"""(text, part): where the part begins in the text, from 1; 0: nowhere."""
