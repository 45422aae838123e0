"""The one place that turns whatever a damaged database raises into one line. No value is checked when it is read:
trajectories have checksums, which whoever loads them compares; what any other damaged cell raises, or `verify` asks
for, is looked for here."""

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
"""What wrong types, missing values and names of missing rows lead to. It may be a mistake of the program, too."""


def first_damage(connection: sa.Connection) -> str | None:
    """The first thing found that can't have been written, in words; None: there is none."""
    for table in metadata.sorted_tables:
        for _, names in misfits(connection, table):
            return f"a value that nobody can have written in {table.name}.{names[0]}"
        for line in dangling(connection, table):
            return line
    return next(wrong_authors(connection), None)


def wrong_authors(connection: sa.Connection) -> Iterator[str]:
    """A line for each run with another table of authors than was written."""
    for row in connection.execute(sa.select(raw(runs.c.id), raw(runs.c.authors), raw(runs.c.authors_hash))):
        try:
            check_authors(*row)
        except DamagedDatabase as error:
            yield error.found


def raw(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    """The column as the driver gives it."""
    return sa.type_coerce(column, sa.types.NullType()).label(column.name)


def misfits(connection: sa.Connection, table: sa.Table) -> Iterator[tuple[Any, list[str]]]:
    """First values of the rows in which columns other than blobs can't hold what stands there, with these columns'
    names."""
    columns = [column for column in table.columns if not isinstance(column.type, sa.LargeBinary)]
    for row in connection.execute(sa.select(*map(raw, columns)).execution_options(yield_per=1000)):
        if names := [column.name for column, value in zip(columns, row, strict=True) if not holds(column, value)]:
            yield row[0], names


def dangling(connection: sa.Connection, table: sa.Table) -> Iterator[str]:
    """A line for each column in which rows name one that is not there; a file may be written by anything."""
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
