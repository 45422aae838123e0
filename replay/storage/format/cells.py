"""What stands in a column and can't have been written there: a look at all cells, without their contents.

A server keeps its types and its NOT NULL itself; in a file, one bit makes a text of a number.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import sqlalchemy as sa

from replay.storage.format.column_types import ExactText, Real, Truth, Whole

_STORED = {ExactText: ("text",), Whole: ("integer",), Real: ("real",), Truth: ("integer",)}
"""What SQLite calls them."""


def damaged_cells(connection: sa.Connection, table: sa.Table) -> list[str]:
    """A line for each column of the table with cells of another kind than the column's."""
    found = connection.execute(_counts(table, connection.dialect.name == "sqlite")).one()
    return [
        f"{table.name}.{column.name}: {count} hold what nobody can have written there"
        for column, count in zip(table.columns, found, strict=True)
        if count
    ]


@cache
def _counts(table: sa.Table, is_file: bool) -> sa.Executable:
    return sa.select(*(sa.func.count().filter(_is_other(column, is_file)) for column in table.columns)).select_from(
        table
    )


def _is_other(column: sa.Column[Any], is_file: bool) -> sa.ColumnElement[bool]:
    missing = sa.false() if column.nullable else column.is_(None)
    if not is_file:
        return missing
    names = next((names for kind, names in _STORED.items() if isinstance(column.type, kind)), ("blob",))
    return missing | (column.is_not(None) & sa.func.typeof(column).not_in(names))
