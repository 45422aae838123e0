"""Types of columns: what each may hold, checked wherever it is read, and texts that no database takes as they are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

from context.wording import excerpt
from replay.errors import DamagedCell

ESCAPE = "\ue000json:"
"""Before a text that is stored as JSON."""


class Checked(sa.types.TypeDecorator[Any]):
    """The type of a column: raises DamagedCell for what can't have been written into it.

    NULL is refused where a column that must not hold it is selected itself: the greatest of no values is NULL too.
    """

    impl: Any = sa.types.NullType
    cache_ok = True
    column = "a column"
    """`table.column`, for errors."""
    rule = ""
    python_types: frozenset[type] = frozenset()
    """The types that drivers make of it."""
    is_required = False
    bounds: tuple[float, float] | None = None
    """The least and the greatest value there can be."""

    def python_types_of(self, column: sa.ColumnElement[Any]) -> frozenset[type]:
        return self.python_types | ({type(None)} if getattr(column, "nullable", True) else frozenset())

    def damaged(self, value: object) -> DamagedCell:
        return DamagedCell(self.column, self.rule, excerpt(repr(value), 60))

    def coerce_compared_value(self, op: Any, value: Any) -> Any:
        return self.impl_instance.coerce_compared_value(op, value)

    def column_expression(self, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        source = column.element if isinstance(column, sa.Label) else column
        if not (isinstance(source, sa.Column) and isinstance(source.table, sa.Table)) or source.nullable:
            return column
        return required(source, source)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        return self.checked

    def checked(self, value: Any) -> Any:
        if value is None:
            if self.is_required:
                raise self.damaged(value)
            return None
        if not self.holds(value) or (self.bounds and not self.bounds[0] <= value <= self.bounds[1]):
            raise self.damaged(value)
        return self.restored(value)

    def holds(self, value: Any) -> bool:
        """Whether the column can hold this, which is not NULL, within its bounds."""
        return type(value) in self.python_types

    def restored(self, value: Any) -> Any:
        return value


class ExactText(Checked):
    """Any Python string, returned as it came.

    Databases refuse NUL or lone surrogates, which models and tools do write: such a text is stored as JSON behind a
    private-use mark, every other one as it is.
    """

    impl = sa.Text
    cache_ok = True
    rule = "hold text"
    python_types = frozenset({str})

    def coerce_compared_value(self, op: Any, value: Any) -> Any:
        return self

    def bind_processor(self, dialect: Dialect) -> Callable[[str | None], str | None]:
        return to_storable

    def holds(self, value: Any) -> bool:
        try:
            return super().holds(value) and from_storable(value) is not None
        except ValueError:
            return False

    def restored(self, value: Any) -> str | None:
        return from_storable(value)


class JsonText(ExactText):
    """The text of a JSON object."""

    cache_ok = True
    rule = "hold a JSON object"

    def holds(self, value: Any) -> bool:
        try:
            return super().holds(value) and isinstance(json.loads(from_storable(value) or ""), dict)
        except (ValueError, RecursionError):
            return False


class Whole(Checked):
    impl = sa.BigInteger
    cache_ok = True
    rule = "hold a whole number"
    python_types = frozenset({int})

    def holds(self, value: Any) -> bool:
        # Sums of a server are decimals.
        return super().holds(value) or isinstance(value, Decimal)


class Real(Checked):
    impl = sa.Double
    cache_ok = True
    rule = "hold a finite number"
    python_types = frozenset({float})

    def holds(self, value: Any) -> bool:
        return type(value) in (float, int) and math.isfinite(value)


class Size(Whole):
    """How many there are of something, which are at least one."""

    cache_ok = True
    rule = "hold a whole number from 1 to 2^31"
    bounds = (1, 2**31)


class Share(Real):
    """A part of a whole."""

    cache_ok = True
    rule = "hold a number from 0 to 1"
    bounds = (0, 1)


class Measured(Real):
    """A number that may be infinite."""

    cache_ok = True
    rule = "hold a number"

    def holds(self, value: Any) -> bool:
        return type(value) in (float, int) and not math.isnan(value)


class Truth(Checked):
    impl = sa.Boolean
    cache_ok = True
    rule = "hold true or false"
    python_types = frozenset({bool, int})
    bounds = (0, 1)

    def restored(self, value: Any) -> bool:
        return bool(value)


def real_columns(columns: Iterable[sa.Column[Any]]) -> list[sa.Column[Any]]:
    return [column for column in columns if isinstance(column.type, Real)]


def required(value: sa.ColumnElement[Any], column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    """`value`, which is the column's wherever it is asked for: NULL where the column may not hold it is damage."""
    kind = column.type
    if isinstance(kind, Checked):
        kind = kind.copy()
        kind.is_required = not column.nullable
    return sa.type_coerce(value, kind)


def storable_column(values: Sequence[str | None]) -> Sequence[str | None]:
    """What ExactText binds, for many values at once."""
    return values if is_storable("".join(filter(None, values))) else [to_storable(value) for value in values]


def restored_column(column: sa.Column[Any], values: Sequence[Any]) -> Sequence[Any]:
    """What a column returns, for many of a driver's values at once: bounds apart, which take longer, as `checked`."""
    kind = column.type
    if not isinstance(kind, Checked):
        return values
    fitting = kind.python_types_of(column)
    if not fitting.issuperset(map(type, values)):
        raise kind.damaged(next(value for value in values if type(value) not in fitting))
    # A boolean is a number in SQLite; hardly any text is escaped.
    if isinstance(kind, Truth) or (isinstance(kind, ExactText) and ESCAPE in "".join(filter(None, values))):
        return [kind.checked(value) for value in values]
    return values


def to_storable(value: str | None) -> str | None:
    return value if value is None or is_storable(value) else ESCAPE + json.dumps(value)


def from_storable(value: str | None) -> str | None:
    """Raises ValueError for what `to_storable` did not make: bound again it would be another text."""
    if value is None or not value.startswith(ESCAPE):
        return value
    escaped = value.removeprefix(ESCAPE)
    text = str(json.loads(escaped)) if escaped.startswith('"') else ""
    # Two lone surrogates that make a pair come back as its character, which needs no escape.
    is_needed = not is_storable(text) or max(text, default="") > "\uffff"
    if json.dumps(text) != escaped or not is_needed:
        raise ValueError(f"{value[:60]!r} is no escaped text")
    return text


def is_storable(text: str) -> bool:
    """Whether a column can hold it as it is. A text with the mark in it can't: as JSON it does no harm."""
    if "\x00" in text or ESCAPE in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
