"""Statements compiled once: SQLAlchemy takes longer to build one than the database to answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.sql.compiler import SQLCompiler

from replay.column_types import Checked, ExactText, Truth, restored_column, storable_column, to_storable
from replay.errors import DamagedCell
from replay.rows import chunked

_Restore = Callable[[Sequence[Any]], Sequence[Any]]


def rows_by_key(
    connection: sa.Connection,
    columns: tuple[sa.Column[Any], ...],
    keys: Sequence[str],
    *,
    key: sa.Column[str],
    order_by: tuple[sa.Column[Any], ...] = (),
) -> Iterator[tuple[Any, ...]]:
    """Values of `columns` for the rows whose `key` is one of `keys`, each given once.

    Raises DamagedCell for a value that nobody wrote there.
    """
    for chunk in chunked(keys):
        # Few statements do for any number of keys: the last key fills up to a power of two.
        size = 1 << (len(chunk) - 1).bit_length()
        statement, names, restore = _compiled(columns, key, order_by, size, connection.dialect)
        values = [*storable_column(chunk), *[storable_column(chunk[-1:])[0]] * (size - len(chunk))]
        parameters = tuple(values) if names is None else dict(zip(names, values, strict=True))
        found = _rows(connection, statement, parameters)
        by_column = zip(*found, strict=True) if found else ()
        yield from zip(*(to_python(column) for to_python, column in zip(restore, by_column, strict=False)), strict=True)


def _rows(connection: sa.Connection, statement: str, parameters: Any) -> Sequence[Sequence[Any]]:
    try:
        return connection.exec_driver_sql(statement, parameters).fetchall()
    except exc.OperationalError as error:
        # A file's texts are decoded as they are fetched.
        if "Could not decode to UTF-8" not in str(error.orig):
            raise
        raise DamagedCell("every text", "be UTF-8", str(error.orig).partition(" with text")[0]) from error


def execute(connection: sa.Connection, statement: sa.Executable, **values: Any) -> sa.CursorResult[Any]:
    """A statement that is kept somewhere, with its parameters by name. Texts among the results are as stored."""
    text, names, fixed = _text(statement, connection.dialect)
    given = {
        **fixed,
        **{name: to_storable(value) if isinstance(value, str) else value for name, value in values.items()},
    }
    parameters: Any = given if names is None else tuple(given[name] for name in names)
    return connection.exec_driver_sql(text, parameters)


@lru_cache(maxsize=64)
def _text(statement: sa.Executable, dialect: sa.Dialect) -> tuple[str, list[str] | None, dict[str, Any]]:
    """The statement's text, the order of its parameters (None: by name), and those it brings itself."""
    assert isinstance(statement, sa.ClauseElement)
    compiled = statement.compile(dialect=dialect)
    assert isinstance(compiled, SQLCompiler)
    order = compiled.positiontup if compiled.positional else None
    return str(compiled), order, {name: value for name, value in compiled.params.items() if value is not None}


@lru_cache(maxsize=128)
def _compiled(
    columns: tuple[sa.Column[Any], ...],
    key: sa.Column[str],
    order_by: tuple[sa.Column[Any], ...],
    size: int,
    dialect: sa.Dialect,
) -> tuple[str, list[str] | None, list[_Restore]]:
    """The statement, the names of its parameters (None: by position), and what makes Python's values of a column."""
    names = [f"key_{number}" for number in range(size)]
    query = sa.select(*columns).where(key.in_([sa.bindparam(name, type_=key.type) for name in names]))
    compiled = query.order_by(*order_by).compile(dialect=dialect)
    return compiled.string, None if compiled.positional else names, [_restore(column) for column in columns]


def _restore(column: sa.Column[Any]) -> _Restore:
    """What makes Python's values of a column's, and refuses what it can't hold."""
    kind = column.type
    convert = _as_they_are
    if isinstance(kind, ExactText):
        convert = _texts_or_none if column.nullable else restored_column
    elif isinstance(kind, Truth):
        # A boolean is a number in SQLite.
        convert = _booleans
    if not isinstance(kind, Checked):
        return convert
    fitting = kind.python_types_of(column)

    def checked(values: Sequence[Any]) -> Sequence[Any]:
        if not fitting.issuperset(map(type, values)):
            raise kind.damaged(next(value for value in values if type(value) not in fitting))
        return convert(values)

    return checked


def _booleans(values: Sequence[Any]) -> Sequence[Any]:
    return [bool(value) for value in values]


def _texts_or_none(values: Sequence[Any]) -> Sequence[Any]:
    there = iter(restored_column([value for value in values if value is not None]))
    return [None if value is None else next(there) for value in values]


def _as_they_are(values: Sequence[Any]) -> Sequence[Any]:
    return values
