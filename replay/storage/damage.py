"""What can't have been written: the one place that turns whatever a damaged database raises into one line.

No value is checked when it is read. What a trajectory is made of stands under checksums, which whoever loads it
compares; what any other damaged cell leads to is an exception somewhere, and then, or when `verify` is asked, it is
looked for here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    exc.DBAPIError,
)
"""What wrong types, missing values and names of missing rows lead to. It may be a mistake of the program, too."""


def first_damage(connection: sa.Connection) -> str | None:
    """The first thing found that can't have been written, in words; None: there is none."""
    for table in metadata.sorted_tables:
        columns = readable(table)
        for row in connection.execute(sa.select(*map(raw, columns)).execution_options(yield_per=1000)):
            for column in misfits(columns, row):
                return f"a value that nobody can have written in {table.name}.{column.name}"
        for name, count in dangling(connection, table).items():
            return f"{count} rows whose {name} names a missing one"
    try:
        for row in connection.execute(sa.select(runs.c.id, runs.c.authors, runs.c.authors_hash)):
            check_authors(*row)
    except DamagedDatabase as error:
        return error.found
    return None


def readable(table: sa.Table) -> list[sa.Column[Any]]:
    """All columns but blobs, which have checksums of their own."""
    return [column for column in table.columns if not isinstance(column.type, sa.LargeBinary)]


def raw(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    """The column as the driver gives it."""
    return sa.type_coerce(column, sa.types.NullType()).label(column.name)


def misfits(columns: Sequence[sa.Column[Any]], row: Sequence[Any]) -> Iterator[sa.Column[Any]]:
    """The columns that can't hold what stands in a row of them."""
    for column, value in zip(columns, row, strict=False):
        if not holds(column, value):
            yield column


def dangling(connection: sa.Connection, table: sa.Table) -> dict[str, int]:
    """How many rows of the table name one that is not there, by `table.column`; a file may be written by anything."""
    counts = {name: connection.scalar(query) for name, query in _references(table).items()}
    return {name: int(count) for name, count in counts.items() if count}


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
