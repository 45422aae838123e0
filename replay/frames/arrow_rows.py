"""Rows of a buffer as Arrow record batches, which pandas, polars, DuckDB and `datasets` can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from replay.errors import ReplayError

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    import polars
    import pyarrow

BATCH_ROWS = 10_000
_TIMES = ("created_at", "started_at")
"""Columns of texts that are times."""


class ArrowRows:
    """Lazy rows. Each pass reads the buffer as it is when the pass begins, and holds one batch in memory.

    Everything that reads Arrow's C stream can read them: `polars.DataFrame(rows)`, `pyarrow.table(rows)`,
    `duckdb.sql("select * from rows")`.
    """

    def __init__(self, schema: pyarrow.Schema, batches: Callable[[], Iterator[pyarrow.RecordBatch]]) -> None:
        self.schema = schema
        self._batches = batches

    def __repr__(self) -> str:
        return f"rows of {', '.join(self.schema.names)}: read them with to_pandas(), to_polars() or to_arrow()"

    def __iter__(self) -> Iterator[pyarrow.RecordBatch]:
        return self._batches()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return arrow().RecordBatchReader.from_batches(self.schema, iter(self)).__arrow_c_stream__(requested_schema)

    def to_arrow(self) -> pyarrow.Table:
        return arrow().Table.from_batches(iter(self), self.schema)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as pandas takes them; integers of a column with unknown ones are `Int64`."""
        import pandas

        table = self.to_arrow()
        frame = table.to_pandas()
        for at, column in enumerate(table.columns):
            if column.null_count and str(column.type).startswith("int"):
                frame.isetitem(at, column.to_pandas(types_mapper={column.type: pandas.Int64Dtype()}.get))
        return frame

    def to_polars(self) -> polars.DataFrame:
        import polars

        return polars.DataFrame(self.to_arrow())


def arrow() -> Any:
    """Import pyarrow. Raises ReplayError if it is missing."""
    if find_spec("pyarrow") is None:
        raise ReplayError(
            "DataFrames must have pyarrow installed, got none. Install the extra: pip install "
            "'agentloop-replay[pandas]', or use SQL: docs/schema.md."
        )
    import pyarrow

    return pyarrow


def schema_of(columns: Sequence[sa.ColumnElement[Any]]) -> pyarrow.Schema:
    pa = arrow()
    types = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    special = {"error_kinds": pa.list_(pa.string()), **dict.fromkeys(_TIMES, pa.timestamp("us", "UTC"))}
    known = {one.name: special.get(one.name) or types.get(one.type.python_type) for one in columns}
    return pa.schema([(name, kind or pa.string()) for name, kind in known.items()])


def selected_batches(
    connection: sa.Connection, columns: Sequence[sa.ColumnElement[Any]], query: sa.Select[Any]
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches of a query for these labelled columns.

    Values are taken as the driver gives them, because SQLAlchemy's conversion takes longer than fetching. A text that
    no database can hold as it is (`ExactText`) stays JSON behind a mark: Arrow could not hold it either.
    """
    pa, schema = arrow(), schema_of(columns)
    streamed = query.with_only_columns(*map(_as_stored, columns)).execution_options(yield_per=BATCH_ROWS)
    for rows in connection.execute(streamed).partitions():
        values = zip(*rows, strict=True)
        arrays = [typed_array(column, kind) for column, kind in zip(values, schema.types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _as_stored(column: sa.ColumnElement[Any]) -> sa.Label[Any]:
    element = column.element if isinstance(column, sa.Label) else column
    return sa.type_coerce(element, sa.types.NullType()).label(column.name)


def typed_array(values: Sequence[Any], kind: Any) -> Any:
    """Make an Arrow array of a driver's values. SQLite gives numbers for booleans, and times are stored as texts."""
    pa = arrow()
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.string()).cast(kind)
    if pa.types.is_list(kind):
        values = [value if value is None else value.split(" ") for value in values]
    if pa.types.is_boolean(kind):
        values = [{0: False, 1: True, None: None}[value] for value in values]
    return pa.array(values, kind)
