"""Texts that no database takes as they are, and what each column of the schema may hold."""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

ESCAPE = "\ue000json:"
"""Before a text that is stored as JSON."""


def column_types(record: type) -> dict[str, Any]:
    """Annotations by name, of the fields of a dataclass that are one column of a table or a file."""
    found, values = get_type_hints(record, include_extras=True), {str, int, float, bool, NoneType}
    return {field.name: found[field.name] for field in fields(record) if types_in(found[field.name]) <= values}


def types_in(annotation: Any) -> set[Any]:
    """What a value of an annotation may be: `{str, NoneType}` for `Id | None`."""
    if get_origin(annotation) is Annotated:
        return types_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(types_in, get_args(annotation)))
    return {annotation}


class ExactText(sa.types.TypeDecorator[str]):
    """Any Python string, returned as it came. Databases refuse NUL or lone surrogates, which models and tools do write:
    such a text is stored as JSON behind a private-use mark. Reading raises ValueError for what can't have been stored
    so."""

    impl = sa.Text
    cache_ok = True

    def coerce_compared_value(self, op: Any, value: Any) -> Any:
        return self

    def bind_processor(self, dialect: Dialect) -> Callable[[str | None], str | None]:
        return to_storable

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[str | None], str | None]:
        return from_storable


def holds(column: sa.Column[Any], value: Any) -> bool:
    """Whether a value, as the driver gives it, can have been written into a column that is no blob."""
    if value is None:
        return bool(column.nullable)
    if isinstance(column.type, ExactText):
        return isinstance(value, str) and _is_text(value, is_json="json" in column.info)
    least, most = column.info["range"]
    numbers = (int, float) if isinstance(column.type, sa.Double) else (int, bool)
    return type(value) in numbers and bool(least <= value <= most)


def _is_text(value: str, *, is_json: bool) -> bool:
    try:
        value.encode()  # bytes that are no UTF-8 are read as lone surrogates
        text = from_storable(value)
        return not is_json or isinstance(json.loads(text or ""), dict)
    except (ValueError, RecursionError):
        return False


def storable_column(values: Sequence[str | None]) -> Sequence[str | None]:
    """What ExactText binds, for many values at once."""
    return values if is_storable("".join(filter(None, values))) else [to_storable(value) for value in values]


def restored_column(column: sa.Column[Any], values: Sequence[Any]) -> Sequence[Any]:
    """What a column holds, for many of a driver's values at once; what is none of its values stays as it is."""
    if isinstance(column.type, sa.Boolean):  # a number in SQLite
        return [bool(value) if value in (0, 1) else value for value in values]
    # Hardly any text is escaped.
    if isinstance(column.type, ExactText) and ESCAPE in "".join([each for each in values if isinstance(each, str)]):
        return [_restored(value) for value in values]
    return values


def _restored(value: Any) -> Any:
    try:
        return from_storable(value) if isinstance(value, str) else value
    except ValueError:
        return value


def to_storable(value: str | None) -> str | None:
    return value if value is None or is_storable(value) else ESCAPE + json.dumps(value)


def from_storable(value: str | None) -> str | None:
    """Raises ValueError for what `to_storable` can't have made."""
    return value if value is None or not value.startswith(ESCAPE) else str(json.loads(value.removeprefix(ESCAPE)))


def is_storable(text: str) -> bool:
    """Whether a column can hold it as it is. A text with the mark in it can't: as JSON it does no harm."""
    if "\x00" in text or ESCAPE in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
