"""One comparison of a filter as an SQL condition, with the same result on SQLite and PostgreSQL.

Both databases compare text by its bytes, and case matters. A text that no database can hold as it is (see `ExactText`)
is stored as JSON: `==` and `in [...]` are exact for these too; a search within a text looks at the characters between
the JSON's quotes, so that it may also find a part of an escape such as the u0000 of a NUL.
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
from replay.storage.format.column_types import ESCAPE, ExactText, is_storable
from replay.storage.format.schema import groups, messages, trajectories

Value = float | int | bool | str
Known = Mapping[str, sa.ColumnElement[Any]]
"""Expressions by the names of fields."""


def compared(field: Field, sign: str, values: Sequence[Value], known: Known) -> sa.ColumnElement[bool]:
    """True or false, never NULL.

    `sign`: one of == < <= > >= in contains startswith, or `is` for a comparison with None, which has no values.
    `known`: expressions that take the place of fields' own.
    """
    if field.kind is FieldKind.messages:
        texts = [str(value) for value in values]
        parts = (_Part(sa.literal_column(name)) for name in ("'content'", "'reasoning'"))
        says = sa.or_(*(_holds(part, sign, values) for part in parts))
        return _exists_message(says, [form for text in texts for form in (text, json.dumps(text)[1:-1])])
    if field.kind is FieldKind.calls:
        # Each call is stored with its name first: see `conversation`.
        begins = [json.dumps({"name": value}, separators=(",", ":"))[:-1] + "," for value in values]
        calls = joined(sa.or_, [_starts(_Call(), begin) for begin in begins])
        return _exists_message(_AnyCall(_Part(sa.literal_column("'tool_calls'")), calls), begins)
    if field.of_group is not None:
        # Groups that fit are found once, not looked up for every member.
        return trajectories.c.group.in_(sa.select(groups.c.id).where(_holds(field.of_group, sign, values)))
    expression = known.get(field.name, field.expression)
    assert expression is not None
    holds = _holds(expression, sign, values)
    return sa.and_(expression.is_not(None), holds) if field.may_be_unknown and sign != "is" else holds


def _exists_message(says: sa.ColumnElement[bool], needles: Sequence[str]) -> sa.ColumnElement[bool]:
    """`says` is asked of each message's parts, where at least one of the needles stands somewhere in all of them.

    To find a text in a conversation takes a tenth of the time of taking the conversation apart.
    """
    mine = messages.c.trajectory == trajectories.c.id
    in_json = [json.dumps(needle, ensure_ascii=False)[1:-1] for needle in needles if is_storable(needle)]
    likely = joined(sa.or_, [_contains(_Plain(messages.c.said), needle) for needle in dict.fromkeys(in_json)])
    return sa.exists().where(mine, likely, _AnyMessage(messages.c.said, says)).correlate(trajectories)


def joined(join: Callable[..., Any], conditions: Sequence[sa.ColumnElement[bool]]) -> sa.ColumnElement[bool]:
    """All of the conditions, or any of them, by sa.and_ or sa.or_.

    Some at a time stand in parentheses: SQLite takes conditions of a certain depth, and a list is as deep as long.
    """
    batches = (conditions[at : at + 50] for at in range(0, len(conditions), 50))
    whole: sa.ColumnElement[bool] = join(*(_Parentheses(join(*batch)) for batch in batches))
    return whole


def _holds(expression: sa.ColumnElement[Any], sign: str, values: Sequence[Value]) -> sa.ColumnElement[bool]:
    if sign == "is":
        return expression.is_(None)
    if sign == "in":
        return expression.in_(values)
    if sign in _SEARCHES:
        return _searched(expression, str(values[0]), _SEARCHES[sign])
    return _COMPARISONS[sign](expression, values[0])


def _searched(
    expression: sa.ColumnElement[Any],
    value: str,
    search: Callable[[sa.ColumnElement[Any], str], sa.ColumnElement[bool]],
) -> sa.ColumnElement[bool]:
    """`search` in the stored text, or between the quotes of its JSON."""
    stored = sa.type_coerce(expression, sa.Text)
    escaped = sa.func.substr(stored, 1, len(ESCAPE)) == ESCAPE
    # The mark and the opening quote before, the closing quote behind.
    inner = sa.func.substr(stored, len(ESCAPE) + 2, sa.func.length(stored) - len(ESCAPE) - 2)
    among_escaped = sa.and_(escaped, search(inner, json.dumps(value)[1:-1]))
    if not is_storable(value):
        return among_escaped
    return sa.or_(sa.and_(sa.not_(escaped), search(stored, value)), among_escaped)


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


_Parentheses = _spelled(sa.Boolean(), sqlite="({})", postgresql="({})")
"""(condition), which is not made part of a longer one."""
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
