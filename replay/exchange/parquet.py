"""Exchanged rows as Parquet: the columns of JSONL with types of their own, and NaN for unknown log-probs."""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from context.tokens.token_sequence import TOKEN_FIELDS
from replay.errors import shortened
from replay.exchange.files import ROWS_AT_ONCE, ExchangeError, batched, opened
from replay.exchange.json_text import BadRow, read_object
from replay.exchange.row_format import (
    Bundle,
    ChatMessage,
    ExchangedRow,
    PlainRow,
    Time,
    from_plain,
    to_plain,
)
from replay.storage.format.column_types import from_storable, to_storable

_MOST_FOOTER = 16 << 20
MOST_GROUP = 512 << 20
_REPEATED = ["run_name", "run_config", "run_authors", "run_authors_hash", "run_code_version", "run_fingerprint"]
_REPEATED += ["tools.list.element"]
"""Columns with the same value in many rows: a row group stores the value once."""


def write(target: Path, bundles: Iterable[Bundle]) -> None:
    """Write the rows to `target`. The bytes depend on the rows and the version of pyarrow alone."""
    _check_installed()
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, as_texts = _schema(pa, pa.json_(), pa.timestamp("us", "UTC")), _schema(pa, pa.string(), pa.string())
    options: dict[str, Any] = {
        "compression": "zstd",
        "use_dictionary": _REPEATED,
        "store_schema": False,
        "write_page_checksum": True,
    }
    with pq.ParquetWriter(target, schema, **options) as writer:
        for rows in batched(bundles, lambda row: row.size):
            plain = [_objects(_with_texts(to_plain(row), to_storable), json.dumps) for row in rows]
            writer.write_table(pa.Table.from_pylist(plain, as_texts).cast(schema), row_group_size=len(rows))


def read(path: Path) -> Iterator[Bundle | BadRow]:
    """Every row, or the problem with it. Raises BadRow for a file that is not Parquet."""
    _check_installed()
    import pyarrow as pa

    with opened(path) as raw:
        try:
            for row in _rows(raw):
                try:
                    yield from_plain(_with_texts(_objects(row, _read_object), _restored))
                except BadRow as error:
                    yield error
        except BadRow:
            raise
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # a time beyond Python's, say
            found = (str(error) or repr(error)).splitlines()[0][:200]
            raise BadRow(f"contents must be Parquet, got: {found}.") from None


def _rows(raw: Any) -> Iterator[PlainRow]:
    """The rows of a file, read in batches."""
    import pyarrow.parquet as pq

    options: dict[str, Any] = {
        "thrift_string_size_limit": _MOST_FOOTER,
        "thrift_container_size_limit": 1 << 20,
        "arrow_extensions_enabled": False,  # JSON as texts
        "pre_buffer": False,
        "buffer_size": 1 << 20,
        "page_checksum_verification": True,
    }
    file = pq.ParquetFile(raw, **options)
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        parts = [group.column(at) for at in range(group.num_columns)]
        taken = sum(max(part.total_uncompressed_size, 8 * part.num_values) for part in parts)
        if taken > MOST_GROUP:
            raise BadRow(
                f"row groups must be at most {MOST_GROUP:,} bytes in memory, got {taken:,} for {group.num_rows} "
                f"rows. Write the file with {ROWS_AT_ONCE} rows in each."
            )
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=[number], use_threads=False):
            yield from batch.to_pylist()


def _objects(row: PlainRow, change: Callable[[Any], Any]) -> PlainRow:
    """The row with its JSON objects changed to texts or back. An earlier row has none."""
    named = ("tools", "messages") if "group_id" in row else ()
    lists = [name for name in named if isinstance(row.get(name), list)]
    return row | {name: [*map(change, row[name])] for name in lists}


def _read_object(text: object) -> Any:
    try:
        return read_object(text, constants=False)
    except ValueError as error:
        raise BadRow(f"messages and tools must be JSON, got {shortened(text)} ({error}).") from None


def _with_texts(value: Any, change: Callable[[str], str | None]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, list):
        return [_with_texts(part, change) for part in value]
    if isinstance(value, dict):
        return {
            change(name): part if name in TOKEN_FIELDS else _with_texts(part, change) for name, part in value.items()
        }
    return value


def _restored(text: str) -> str | None:
    try:
        return from_storable(text)
    except ValueError as error:
        raise BadRow(f"text must be escaped as an export escapes it, got {shortened(text)} ({error}).") from None


def _check_installed() -> None:
    if find_spec("pyarrow") is None:
        raise ExchangeError(
            "Parquet must have pyarrow installed, got none. Install the extra: "
            "pip install 'agentloop-replay[parquet]', or use .jsonl."
        )


def _schema(pa: Any, objects: Any, times: Any) -> Any:
    """The columns in Arrow. `objects` is the type of JSON objects, and `times` that of times."""
    numbers = {name: pa.list_(pa.from_numpy_dtype(dtype)) for name, dtype in TOKEN_FIELDS.items()}
    kinds = {str: pa.string(), dict: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}

    def fields(part: type[BaseModel]) -> list[Any]:
        return [pa.field(name, numbers.get(name) or kind(row.annotation)) for name, row in part.model_fields.items()]

    def kind(annotation: Any) -> Any:
        """The type of a column. An optional column has the type of its known values, and JSON is a text."""
        origin, args = get_origin(annotation), [arg for arg in get_args(annotation) if arg is not NoneType]
        if annotation == Time | None:
            return times
        if origin is list and (get_origin(args[0]) is dict or args[0] is ChatMessage):
            return pa.list_(objects)
        if origin is list:
            return pa.list_(kinds.get(args[0]) or pa.struct(fields(args[0])))
        if origin is Literal:
            return kinds[type(args[0])]
        return kinds.get(origin or annotation) or kind(args[0])

    return pa.schema(fields(ExchangedRow))
