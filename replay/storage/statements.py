"""Statements that are compiled once: SQLAlchemy takes longer to build one than the database to answer it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from replay.storage.format.column_types import ExactText, restored_column, storable_column
from replay.storage.format.rows import Row, chunked

_Convert = Callable[[Sequence[Any]], Sequence[Any]]


class _ByDialect(FunctionElement[Any]):
    """An SQL expression that each database writes in its own way."""

    inherit_cache = True
    sqlite: str
    postgresql: str


@compiles(_ByDialect)
def _compile(element: _ByDialect, compiler: SQLCompiler, **options: Any) -> str:
    template: str = getattr(element, compiler.dialect.name)
    return template.format(*(compiler.process(clause, **options) for clause in element.clauses))


def spelled(kind: sa.types.TypeEngine[Any], *, sqlite: str, postgresql: str) -> type[_ByDialect]:
    """The class of an expression that each database writes in its own way; {} stands for each clause in turn."""
    attributes = {"type": kind, "inherit_cache": True, "sqlite": sqlite, "postgresql": postgresql}
    return type("_Spelled", (_ByDialect,), attributes)


seconds_now = spelled(
    sa.Double(),
    sqlite="((julianday('now') - 2440587.5) * 86400.0)",
    postgresql="cast(extract(epoch from clock_timestamp()) as double precision)",
)
"""Seconds since 1970 by the database's clock when it evaluates this. The clock ends leases, and orders nothing."""


def selected(
    connection: sa.Connection, columns: Sequence[sa.ColumnElement[Any]], key: sa.ColumnElement[str], keys: Sequence[str]
) -> Iterator[sa.Row[Any]]:
    for chunk in chunked(list(dict.fromkeys(keys))):
        yield from connection.execute(sa.select(*columns).where(key.in_(chunk)))


def rows_by_key(
    connection: sa.Connection,
    columns: tuple[sa.Column[Any], ...],
    keys: Sequence[str],
    *,
    key: sa.Column[str],
    order_by: tuple[sa.Column[Any], ...] = (),
) -> Iterator[tuple[Any, ...]]:
    """Yield the values of `columns` for the rows whose `key` is one of `keys`. Each row comes once."""
    for chunk in chunked(keys):
        # The last key is repeated up to a power of two, so that few statements serve any number of keys.
        size = 1 << (len(chunk) - 1).bit_length()
        text, order = _by_key(columns, key, order_by, size, connection.dialect)
        values = [*storable_column(chunk), *[storable_column(chunk[-1:])[0]] * (size - len(chunk))]
        given = {f"key_{number}": value for number, value in enumerate(values)}
        found = connection.exec_driver_sql(text, tuple(map(given.get, order)) if order else given).fetchall()
        if found:
            yield from zip(*map(restored_column, columns, zip(*found, strict=True)), strict=True)


def remove(connection: sa.Connection, table: sa.Table, rows: sa.ColumnElement[bool]) -> int:
    """Delete rows of a table and all rows that refer to them. Returns the number of rows deleted from the table."""
    for part in table.metadata.tables.values():
        for key in part.foreign_keys:
            if key.column.table is table:
                connection.execute(part.delete().where(key.parent.in_(sa.select(key.column).where(rows))))
    return connection.execute(table.delete().where(rows)).rowcount


def insert(connection: sa.Connection, table: sa.Table, rows: Sequence[Row]) -> None:
    if rows:
        insert_columns(connection, table, {name: [row[name] for row in rows] for name in rows[0]})


def insert_columns(connection: sa.Connection, table: sa.Table, columns: Mapping[str, Sequence[Any]]) -> None:
    """Insert at least one row, given as columns by name. SQLAlchemy's own lookup of each value would take longer."""
    statement, positions, bind = _compiled_insert(table, tuple(columns), connection.dialect)
    names = positions or list(bind)
    values = zip(*(bind[name](columns[name]) for name in names), strict=True)
    rows = list(values) if positions else [dict(zip(names, row, strict=True)) for row in values]
    connection.exec_driver_sql(statement, rows)


@lru_cache(maxsize=64)
def _compiled_insert(
    table: sa.Table, names: tuple[str, ...], dialect: sa.Dialect
) -> tuple[str, list[str] | None, dict[str, _Convert]]:
    """The statement, the order of its parameters (None: by name), and the conversion of each column for the driver."""
    compiled = table.insert().compile(dialect=dialect, column_keys=names)
    return compiled.string, compiled.positiontup, {name: _bind_column(table.c[name].type, dialect) for name in names}


def _bind_column(kind: sa.types.TypeEngine[Any], dialect: sa.Dialect) -> _Convert:
    if isinstance(kind, ExactText):
        return storable_column
    to_driver = kind.dialect_impl(dialect).bind_processor(dialect)
    return (lambda values: [to_driver(value) for value in values]) if to_driver else list


@lru_cache(maxsize=192)
def _by_key(
    columns: tuple[sa.Column[Any], ...],
    key: sa.Column[str],
    order_by: tuple[sa.Column[Any], ...],
    size: int,
    dialect: sa.Dialect,
) -> tuple[str, list[str] | None]:
    """The text of a query for the rows of `size` keys, and the order of its parameters (None: by name)."""
    keys = [sa.bindparam(f"key_{number}", type_=key.type) for number in range(size)]
    compiled = sa.select(*columns).where(key.in_(keys)).order_by(*order_by).compile(dialect=dialect)
    assert isinstance(compiled, SQLCompiler)
    return str(compiled), compiled.positiontup if compiled.positional else None
