"""A filter's tree as an SQL condition, with the same answer on SQLite and PostgreSQL.

Both databases compare text by its bytes, and case matters. A text that no database can hold as it is (see `ExactText`)
is stored as JSON: `=` and `in` are exact for these too; `like` and `contains` look at the characters between its
quotes, so that they may also find a part of an escape such as the u0000 of a NUL.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from replay.queries.filters.fields import Kind
from replay.queries.filters.grammar import All, Comparison, Node, Not, check_size, parsed
from replay.storage.format.column_types import ESCAPE, ExactText, is_storable
from replay.storage.format.schema import groups, messages, trajectories

Known = Mapping[str, sa.ColumnElement[Any]]
"""Expressions by the names of fields."""
NOTHING: Known = {}
_Search = Callable[[sa.ColumnElement[str], Sequence[str]], sa.ColumnElement[bool]]


@dataclass(frozen=True)
class Parts:
    """What must hold of a row: of its columns, and of what was said in it, which takes a thousand times as long."""

    columns: sa.ColumnElement[bool]
    messages: sa.ColumnElement[bool] | None
    """None: nothing is asked of what was said."""


def condition(text: str) -> sa.ColumnElement[bool]:
    """For a query over the table `trajectories`. Raises WrongFilter."""
    return _condition(parsed(text), NOTHING)


def conditions(texts: Iterable[str], *, known: Known = NOTHING) -> Parts:
    """All of them hold. `known`: expressions that take the place of fields' own. Raises WrongFilter."""
    trees = [parsed(text) for text in texts]
    check_size(trees)
    nodes = [part for tree in trees for part in _all_parts(tree)]
    slow = [_asks_messages(node) for node in nodes]
    columns = [_condition(node, known) for node, is_slow in zip(nodes, slow, strict=True) if not is_slow]
    messages = [_condition(node, known) for node, is_slow in zip(nodes, slow, strict=True) if is_slow]
    return Parts(sa.and_(sa.true(), *columns), sa.and_(*messages) if messages else None)


def _all_parts(node: Node) -> Iterator[Node]:
    if isinstance(node, All):
        for part in node.parts:
            yield from _all_parts(part)
    else:
        yield node


def _asks_messages(node: Node) -> bool:
    if isinstance(node, Comparison):
        return node.field.asks_messages
    return any(map(_asks_messages, (node.part,) if isinstance(node, Not) else node.parts))


def _condition(node: Node, known: Known) -> sa.ColumnElement[bool]:
    if isinstance(node, Comparison):
        return _comparison(node, known)
    if isinstance(node, Not):
        return sa.not_(_condition(node.part, known).self_group())
    join = sa.and_ if isinstance(node, All) else sa.or_
    return join(*(_condition(part, known) for part in node.parts))


def _comparison(node: Comparison, known: Known) -> sa.ColumnElement[bool]:
    field = node.field
    if field.kind is Kind.messages:
        said = sa.or_(*(_compared(_Part(name), node) for name in (_CONTENT, _REASONING)))
        return _exists_message(said, [form for text in _literals(node) for form in (text, json.dumps(text)[1:-1])])
    if field.kind is Kind.calls:
        # Each call is stored with its name first: see `conversation`.
        begins = [json.dumps({"name": value}, separators=(",", ":"))[:-1] + "," for value in node.values]
        return _exists_message(_Calls(_Part(_CALLS), *map(_text, begins)), begins)
    if field.of_group is not None:
        # Groups that fit are found once, not looked up for every member.
        fits = field.of_group.is_(None) if node.sign == "null" else _compared(field.of_group, node)
        return trajectories.c.group.in_(sa.select(groups.c.id).where(fits))
    assert field.expression is not None
    expression = known[field.name] if field.name in known else field.expression()
    if node.sign == "null":
        return expression.is_(None)
    compared = _compared(expression, node)
    return sa.and_(expression.is_not(None), compared) if field.may_be_unknown else compared


def _exists_message(said: sa.ColumnElement[bool], needles: Sequence[str]) -> sa.ColumnElement[bool]:
    """`said` is asked of each message's parts, where at least one of the needles stands somewhere in all of them.

    To find a text in a conversation takes a tenth of the time of taking the conversation apart.
    """
    mine = messages.c.trajectory == trajectories.c.id
    in_json = [json.dumps(needle, ensure_ascii=False)[1:-1] for needle in needles if is_storable(needle)]
    likely = sa.or_(*(_Position(_Plain(messages.c.said), _text(needle)) > 0 for needle in dict.fromkeys(in_json)))
    return sa.exists().where(mine, likely, _AnyMessage(messages.c.said, said)).correlate(trajectories)


def _literals(node: Comparison) -> list[str]:
    """Texts one of which a value holds that fits."""
    texts = [str(value) for value in node.values]
    return [max(_pattern(text)[::2], key=len) for text in texts] if node.sign == "like" else texts


def _compared(expression: sa.ColumnElement[Any], node: Comparison) -> sa.ColumnElement[bool]:
    value = node.values[0]
    if node.sign == "in":
        return expression.in_(node.values)
    if node.sign == "contains":
        return _searched(expression, [str(value)], lambda column, parts: _Position(column, _text(parts[0])) > 0)
    if node.sign == "like":
        return _searched(expression, _pattern(str(value)), _matches)
    return _BY_SIGN[node.sign](expression, value)


_BY_SIGN: dict[str, Callable[[sa.ColumnElement[Any], Any], sa.ColumnElement[bool]]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _searched(expression: sa.ColumnElement[Any], parts: Sequence[str], search: _Search) -> sa.ColumnElement[bool]:
    """`search` in the stored text, or between the quotes of its JSON; `parts` are the literal ones of a pattern."""
    stored = sa.type_coerce(expression, sa.Text)
    escaped = sa.func.substr(stored, 1, len(ESCAPE)) == ESCAPE
    # The mark and the opening quote before, the closing quote behind.
    inner = sa.func.substr(stored, len(ESCAPE) + 2, sa.func.length(stored) - len(ESCAPE) - 2)
    among_escaped = sa.and_(escaped, search(inner, [json.dumps(part)[1:-1] for part in parts]))
    if not all(map(is_storable, parts)):
        return among_escaped
    return sa.or_(sa.and_(sa.not_(escaped), search(stored, parts)), among_escaped)


def _text(value: str) -> sa.BindParameter[str]:
    return sa.bindparam(None, value, sa.Text)


def _pattern(like: str) -> list[str]:
    """Literal parts and wildcards by turns, beginning with a literal one; `\\%` and `\\_` are literal."""
    parts = [""]
    for match in re.finditer(r"\\([%_\\])|([%_])|(.)", like, re.DOTALL):
        if match[2]:
            parts += [match[2], ""]
        else:
            parts[-1] += match[1] or match[3]
    return parts


def _matches(column: sa.ColumnElement[str], parts: Sequence[str]) -> sa.ColumnElement[bool]:
    """SQLite's LIKE does not mind case, and PostgreSQL has no GLOB."""
    literals = [position % 2 == 0 for position in range(len(parts))]
    globbed = [
        re.sub(r"[*?[]", r"[\g<0>]", part) if literal else _GLOB[part]
        for part, literal in zip(parts, literals, strict=True)
    ]
    liked = [
        re.sub(r"[\\%_]", r"\\\g<0>", part) if literal else part for part, literal in zip(parts, literals, strict=True)
    ]
    return _Like(column, _text("".join(globbed)), _text("".join(liked)))


_GLOB = {"%": "*", "_": "?"}


_CONTENT: sa.ColumnElement[str] = sa.literal_column("'content'")
_REASONING: sa.ColumnElement[str] = sa.literal_column("'reasoning'")
_CALLS: sa.ColumnElement[str] = sa.literal_column("'tool_calls'")


class _AnyMessage(FunctionElement[bool]):
    """(messages of a trajectory as they are stored, condition on the parts of one of them)"""

    type = sa.Boolean()
    inherit_cache = True


class _Plain(FunctionElement[str]):
    """(messages of a trajectory as they are stored): the JSON."""

    type = sa.Text()
    inherit_cache = True


class _Part(FunctionElement[str]):
    """(name): of the message that is looked at; NULL where it has no such part."""

    type = ExactText()
    inherit_cache = True


class _Position(FunctionElement[int]):
    """(text, part): where the part begins in the text, from 1; 0: nowhere."""

    type = sa.Integer()
    inherit_cache = True


class _Like(FunctionElement[bool]):
    """(text, pattern as a glob, pattern for LIKE)"""

    type = sa.Boolean()
    inherit_cache = True


class _Calls(FunctionElement[bool]):
    """(tool calls as JSON, how a call begins, ...): whether one of the calls begins so.

    Calls are compared as the JSON that was written, in which no text is too odd for a database to look at.
    """

    type = sa.Boolean()
    inherit_cache = True


@compiles(_AnyMessage, "sqlite")
def _any_message_sqlite(element: _AnyMessage, compiler: SQLCompiler, **options: Any) -> str:
    stored, condition = (compiler.process(clause, **options) for clause in element.clauses)
    return f"EXISTS (SELECT 1 FROM json_each(plain_text({stored})) AS message WHERE {condition})"  # noqa: S608


@compiles(_Plain, "sqlite")
def _plain_sqlite(element: _Plain, compiler: SQLCompiler, **options: Any) -> str:
    return f"plain_text({compiler.process(element.clauses, **options)})"


@compiles(_Plain, "postgresql")
def _plain_postgresql(element: _Plain, compiler: SQLCompiler, **options: Any) -> str:
    return compiler.process(element.clauses, **options)


@compiles(_AnyMessage, "postgresql")
def _any_message_postgresql(element: _AnyMessage, compiler: SQLCompiler, **options: Any) -> str:
    stored, condition = (compiler.process(clause, **options) for clause in element.clauses)
    each = f"json_array_elements(CAST({stored} AS json)) AS message(value)"
    return f"EXISTS (SELECT 1 FROM {each} WHERE {condition})"  # noqa: S608


@compiles(_Part, "sqlite")
def _part_sqlite(element: _Part, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_extract(message.value, '$.' || {compiler.process(element.clauses, **options)})"


@compiles(_Part, "postgresql")
def _part_postgresql(element: _Part, compiler: SQLCompiler, **options: Any) -> str:
    return f"(message.value ->> {compiler.process(element.clauses, **options)})"


@compiles(_Position, "sqlite")
def _position_sqlite(element: _Position, compiler: SQLCompiler, **options: Any) -> str:
    return f"instr({compiler.process(element.clauses, **options)})"


@compiles(_Position, "postgresql")
def _position_postgresql(element: _Position, compiler: SQLCompiler, **options: Any) -> str:
    return f"strpos({compiler.process(element.clauses, **options)})"


@compiles(_Like, "sqlite")
def _like_sqlite(element: _Like, compiler: SQLCompiler, **options: Any) -> str:
    text, glob, _ = element.clauses
    return f"({compiler.process(text, **options)} GLOB {compiler.process(glob, **options)})"


@compiles(_Like, "postgresql")
def _like_postgresql(element: _Like, compiler: SQLCompiler, **options: Any) -> str:
    text, _, like = element.clauses
    return f"({compiler.process(text, **options)} LIKE {compiler.process(like, **options)})"


@compiles(_Calls, "sqlite")
def _calls_sqlite(element: _Calls, compiler: SQLCompiler, **options: Any) -> str:
    calls, *begins = (compiler.process(clause, **options) for clause in element.clauses)
    return _any_call(f"json_each({calls}) AS called", "called.value", begins)


@compiles(_Calls, "postgresql")
def _calls_postgresql(element: _Calls, compiler: SQLCompiler, **options: Any) -> str:
    calls, *begins = (compiler.process(clause, **options) for clause in element.clauses)
    each = f"json_array_elements(CAST({calls} AS json)) AS called(value)"
    return _any_call(each, "CAST(called.value AS text)", begins)


def _any_call(each: str, call: str, begins: Sequence[str]) -> str:
    """Of compiled clauses: values stand in none of them."""
    one_of = " OR ".join(f"substr({call}, 1, length({begin})) = {begin}" for begin in begins)
    return f"EXISTS (SELECT 1 FROM {each} WHERE {one_of})"  # noqa: S608
