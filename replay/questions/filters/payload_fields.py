"""Fields of tasks' payloads, which filters name `payload['level']`, or `payload['info']['level']` within an object."""

import ast
from collections.abc import Sequence

import sqlalchemy as sa

from context.messages import canonical_json
from replay.storage.format.column_types import is_storable
from replay.storage.format.schema import tasks
from replay.storage.statements import spelled

_JsonField = spelled(sa.Text(), sqlite="({} -> ('$.\"' || {} || '\"'))", postgresql="(CAST({} AS json) -> {})")
"""(JSON of an object, name): the JSON of its field. NULL: it has none, or is no object."""


def payload_name(path: Sequence[str]) -> str:
    return "payload" + "".join(f"[{name!r}]" for name in path)


def is_payload_name(name: str) -> bool:
    """Whether filters can name this field of an object. Both databases then find it by the same text."""
    return name.isprintable() and not {'"', "\\"} & {*name}


def payload_path(node: ast.expr) -> tuple[str, ...]:
    """Return the names in `payload['info']['level']`. Empty: the node is something else."""
    names: list[str] = []
    while isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        names.insert(0, str(node.slice.value))
        node = node.value
    is_payload = isinstance(node, ast.Name) and node.id == "payload"
    return tuple(names) if is_payload and all(map(is_payload_name, names)) else ()


def payload_value(path: Sequence[str]) -> sa.ColumnElement[str]:
    """Return an expression for the JSON of a field of `tasks.payload`. NULL: the database finds no such field."""
    payload = sa.type_coerce(tasks.c.payload, sa.Text)
    value: sa.ColumnElement[str] = payload
    for name in path:
        value = _JsonField(value, sa.bindparam(None, name, sa.Text))
    # A text that the database can't hold as it is has a mark before it, and PostgreSQL refuses an escaped NUL.
    is_plain = (sa.func.substr(payload, 1, 1) == "{") & (sa.func.replace(payload, "\\u0000", "") == payload)
    return sa.case((is_plain, sa.cast(value, sa.Text)))


def as_number(value: sa.ColumnElement[str]) -> sa.ColumnElement[float]:
    """Return an expression for JSON as a number. NULL: it is no number."""
    is_number = sa.func.substr(value, 1, 1).in_([*"-0123456789"])
    return sa.case((is_number, sa.cast(value, sa.Double)))


def is_one_of(value: sa.ColumnElement[str], given: Sequence[float | bool | str]) -> sa.ColumnElement[bool]:
    """Return the condition that JSON is one of these values. A payload may have a whole number as 2 or as 2.0."""
    numbers = [each for each in given if not isinstance(each, bool | str)]
    whole = [form for each in numbers if each == int(each) for form in (int(each), float(each))]
    forms = map(canonical_json, [*given, *whole])
    return sa.func.coalesce(value, "null").in_([form for form in forms if is_storable(form)])
