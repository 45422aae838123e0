"""The type of each column: texts that no database takes as they are, and the values that a column may hold."""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

ESCAPE = "\ue000json:"
"""The prefix of a text that is stored as JSON."""


def column_types(record: type) -> dict[str, Any]:
    """The annotations, by name, of the fields of a dataclass that are one column of a table or a file."""
    found, values = get_type_hints(record, include_extras=True), {str, int, float, bool, NoneType}
    return {field.name: found[field.name] for field in fields(record) if types_in(found[field.name]) <= values}


def types_in(annotation: Any) -> set[Any]:
    """The types that an annotation allows: `{str, NoneType}` for `Id | None`."""
    if get_origin(annotation) is Annotated:
        return types_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(types_in, get_args(annotation)))
    return {annotation}


class ExactText(sa.types.TypeDecorator[str]):
    """A column of any Python string, which reads back unchanged.

    Databases refuse NUL and lone surrogates, which models and tools do write. A text with them is stored as JSON after
    a private-use mark. Reading raises ValueError for a text with the mark that was not stored in this way.
    """

    impl = sa.Text
    cache_ok = True

    def coerce_compared_value(self, op: Any, value: Any) -> Any:
        return self

    def bind_processor(self, dialect: Dialect) -> Callable[[str | None], str | None]:
        return to_storable

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[str | None], str | None]:
        return from_storable


def holds(column: sa.Column[Any], value: Any) -> bool:
    """True if a column without blobs may contain this value of a driver."""
    if value is None:
        return bool(column.nullable)
    if isinstance(column.type, ExactText):
        return isinstance(value, str) and _is_text(value, is_json="json" in column.info)
    least, most = column.info["range"]
    numbers = (int, float) if isinstance(column.type, sa.Double) else (int, bool)
    return type(value) in numbers and bool(least <= value <= most)


def _is_text(value: str, *, is_json: bool) -> bool:
    try:
        value.encode()  # bytes that are not UTF-8 were read as lone surrogates
        text = from_storable(value)
        return not is_json or isinstance(json.loads(text or ""), dict)
    except (ValueError, RecursionError):
        return False


def storable_column(values: Sequence[str | None]) -> Sequence[str | None]:
    """The values as ExactText stores them, for many values at once."""
    return values if is_storable("".join(filter(None, values))) else [to_storable(value) for value in values]


def restored_column(column: sa.Column[Any], values: Sequence[Any]) -> Sequence[Any]:
    """The Python values for many driver's values of a column at once. A value that the column can't hold stays as it
    is."""
    if isinstance(column.type, sa.Boolean):  # a number in SQLite
        return [bool(value) if value in (0, 1) else value for value in values]
    # Hardly any text is escaped, so one search in all of them saves time.
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
    """The text that `to_storable` stored. Raises ValueError for a text that it can't have made."""
    return value if value is None or not value.startswith(ESCAPE) else str(json.loads(value.removeprefix(ESCAPE)))


def is_storable(text: str) -> bool:
    """True if a column can hold the text unchanged. A text that contains the mark is stored as JSON too."""
    if "\x00" in text or ESCAPE in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
