"""The database's own clock, which every machine that asks it shares. It ends leases, and orders nothing."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler


class seconds_now(sa.ColumnElement[float]):
    """Seconds since 1970 at the moment the database evaluates it, not when the transaction began."""

    type = sa.Double()
    inherit_cache = True


@compiles(seconds_now, "sqlite")
def _of_file(element: seconds_now, compiler: SQLCompiler, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(seconds_now, "postgresql")
def _of_server(element: seconds_now, compiler: SQLCompiler, **options: Any) -> str:
    return "cast(extract(epoch from clock_timestamp()) as double precision)"
