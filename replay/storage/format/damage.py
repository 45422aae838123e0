"""A search for damage in a database. Values are not checked when they are read: trajectories have checksums, which are
compared at loading. If any other damaged cell raises an exception, or `verify` asks, this module names the damage in
one line."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from replay.errors import DamagedDatabase
from replay.storage.format.column_types import holds
from replay.storage.format.rows import check_authors
from replay.storage.format.schema import draws, metadata, reclaimed, runs, trajectories

RAISED_BY_DAMAGE = (
    *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, AssertionError),
    exc.SQLAlchemyError,
)
"""Exceptions that wrong types, missing values and names of missing rows cause. A bug may raise them too."""


def first_damage(connection: sa.Connection) -> str | None:
    """Describe the first value found that this program can't have written. None: there is no such value."""
    for table in metadata.sorted_tables:
        for _, names in misfits(connection, table):
            return f"a value that nobody can have written in {table.name}.{names[0]}"
        for line in dangling(connection, table):
            return line
    return next(wrong_authors(connection), None)


def wrong_authors(connection: sa.Connection) -> Iterator[str]:
    """Return a line for each run whose author table has been changed."""
    for row in connection.execute(sa.select(raw(runs.c.id), raw(runs.c.authors), raw(runs.c.authors_hash))):
        try:
            check_authors(*row)
        except DamagedDatabase as error:
            yield error.found


def raw(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    """The column with its values as the driver gives them."""
    return sa.type_coerce(column, sa.types.NullType()).label(column.name)


def misfits(connection: sa.Connection, table: sa.Table) -> Iterator[tuple[Any, list[str]]]:
    """The first value of each row with cells that can't have been written, and the names of their columns. Blobs are
    not checked."""
    columns = [column for column in table.columns if not isinstance(column.type, sa.LargeBinary)]
    for row in connection.execute(sa.select(*map(raw, columns)).execution_options(yield_per=1000)):
        if names := [column.name for column, value in zip(columns, row, strict=True) if not holds(column, value)]:
            yield row[0], names


def dangling(connection: sa.Connection, table: sa.Table) -> Iterator[str]:
    """A line for each column in which rows name a missing row. Any program may have written the file."""
    for name, query in _references(table).items():
        if count := connection.scalar(query):
            yield f"{count:,} rows whose {name} names a missing one"


@cache
def _references(table: sa.Table) -> dict[str, sa.Select[Any]]:
    found = {}
    for reference in table.foreign_keys:
        target = reference.column.table.alias()
        there = sa.exists().where(target.c[reference.column.key] == reference.parent).correlate(table)
        missing = sa.select(sa.func.count()).select_from(table).where(reference.parent.is_not(None), ~there)
        found[f"{table.name}.{reference.parent.name}"] = missing
    if table is draws:
        stored, gone = (sa.exists().where(each.c.id == draws.c.trajectory) for each in (trajectories, reclaimed))
        found["draws.trajectory"] = sa.select(sa.func.count()).select_from(draws).where(~stored, ~gone)
    return found
