"""Exchanged rows as Parquet: the columns of JSONL in their own types, lists of numbers, NaN for unknown log-probs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replay.exchange.files import ExchangeError, opened
from replay.exchange.plain import ARRAYS, COLUMNS, PARTS, BadRow, Bundle, Column, PlainRow, from_plain, to_plain
from replay.exchange.strict_json import shortened
from replay.schema import from_storable, to_storable

if TYPE_CHECKING:
    import pyarrow as pa

_GROUP_ROWS = 64
_GROUP_BYTES = 8 << 20
"""Rows are read a row group at a time: about as much goes into one, and never less than a row."""
MOST_GROUP = 48 << 20
"""Bytes that one row group of a file may take in memory, by what the file says of it."""
_MOST_FOOTER = 16 << 20
_REPEATED = ["run_name", "run_config", "run_authors", "run_authors_hash", "run_code_version", "run_fingerprint"]
"""Columns that are the same in many rows: stored once per row group."""


def write(target: Path, bundles: Iterable[Bundle]) -> int:
    """The rows to `target`; the same bytes for the same rows and the same version of pyarrow. How many."""
    pa, pq = _pyarrow()
    schema = _schema(pa)
    count = 0
    options: dict[str, Any] = {"compression": "zstd", "use_dictionary": _REPEATED, "store_schema": False}
    with pq.ParquetWriter(target, schema, **options) as writer:
        for rows in _row_groups(map(to_plain, bundles)):
            arrays = [_pa_array(pa, [row[field.name] for row in rows], field.type) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=len(rows))
            count += len(rows)
    return count


def read(path: Path) -> Iterator[Bundle | BadRow]:
    """Every row, or what is wrong with it; raises BadRow for a file that is no Parquet of these columns.

    Nothing of a row group is read before what the file says of its size fits in memory.
    """
    pa, pq = _pyarrow()
    with opened(path) as raw:
        try:
            file = pq.ParquetFile(
                raw, thrift_string_size_limit=_MOST_FOOTER, thrift_container_size_limit=1 << 20, pre_buffer=False
            )
            _check_schema(pa, file.schema_arrow)
            for group in range(file.num_row_groups):
                _check_size(file.metadata.row_group(group), group)
                yield from _rows(file.read_row_group(group, use_threads=False))
        except (pa.ArrowException, OSError) as error:
            raise BadRow(f"contents must be Parquet, got: {str(error).splitlines()[0][:200]}.") from None


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ExchangeError(
            "Parquet must have pyarrow installed, got none. Install the extra: pip install 'agentloop[parquet]', or "
            "use .jsonl."
        ) from error
    return pyarrow, pyarrow.parquet


def _schema(pa: Any) -> Any:
    return pa.schema([_field(pa, column) for column in COLUMNS])


def _field(pa: Any, column: Column) -> Any:
    plain = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    if column.kind == "list":
        kind = pa.list_(pa.struct([_field(pa, part) for part in PARTS[column.name]]))
    elif column.kind in plain:
        kind = plain[column.kind]
    else:
        kind = pa.list_({"int32": pa.int32(), "uint8": pa.uint8(), "float32": pa.float32()}[column.kind])
    return pa.field(column.name, kind, nullable=True)


def _row_groups(rows: Iterable[PlainRow]) -> Iterator[list[PlainRow]]:
    group: list[PlainRow] = []
    size = 0
    for row in rows:
        mine = _size(row)
        if group and (len(group) == _GROUP_ROWS or size + mine > _GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(row)
        size += mine
    if group:
        yield group


def _size(row: PlainRow) -> int:
    arrays = sum(int(part[name].nbytes) for part in row["segments"] for name in ARRAYS)
    texts = sum(len(value) for value in row.values() if isinstance(value, str))
    return arrays + texts + sum(_message_size(message) for message in row["messages"])


def _message_size(message: PlainRow) -> int:
    calls = sum(len(call["name"]) + len(call["arguments"]) for call in message["tool_calls"])
    return len(message["content"]) + len(message["reasoning"] or "") + calls


def _pa_array(pa: Any, values: Sequence[Any], kind: Any) -> Any:
    if pa.types.is_string(kind):
        return pa.array([to_storable(value) for value in values], kind)
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        parts = [part for value in values for part in value]
        offsets = np.cumsum([0, *map(len, values)])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), _pa_array(pa, parts, kind.value_type), type=kind)
    if pa.types.is_struct(kind):
        columns = [_pa_array(pa, [value[field.name] for value in values], field.type) for field in kind]
        return pa.StructArray.from_arrays(columns, fields=list(kind))
    return pa.array(values, kind)


def _check_schema(pa: Any, found: Any) -> None:
    """The columns in any order, whatever a file's writer calls the insides of a list."""
    wanted = {field.name: field.type for field in _schema(pa)}
    for field in found:
        if field.name not in wanted:
            raise BadRow(f"columns must be those of an export, got {shortened(field.name)}.")
        if not field.type.equals(wanted[field.name]):
            kinds = f"{wanted[field.name]}, got {shortened(str(field.type))}"
            raise BadRow(f"{field.name} must be of type {kinds}.")
    missing = [name for name in wanted if name not in found.names]
    if missing or len(found) != len(wanted):
        raise BadRow(f"columns must hold {', '.join(map(repr, missing))}, got none.")


def _check_size(group: Any, number: int) -> None:
    """A few bytes of Parquet can stand for any number of values, and one text for each of them."""
    size = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        width = _WIDTHS.get(chunk.physical_type)
        repeated = any("DICTIONARY" in encoding for encoding in chunk.encodings)
        most = chunk.num_values * (chunk.total_uncompressed_size if repeated else 0)
        size += chunk.total_uncompressed_size + (most if width is None else chunk.num_values * width)
    if size > MOST_GROUP:
        raise BadRow(
            f"row group {number} must take at most {MOST_GROUP:,} bytes, got up to {size:,}. Write smaller row groups, "
            "or texts without a dictionary."
        )


_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}


def _rows(table: pa.Table) -> Iterator[Bundle | BadRow]:
    columns = {name: _values(table.column(name).combine_chunks()) for name in table.column_names}
    for index in range(table.num_rows):
        try:
            yield from_plain({name: values[index] for name, values in columns.items()})
        except BadRow as error:
            yield error


def _values(array: Any) -> list[Any]:
    """What `to_plain` gave: lists of parts, arrays of numbers, texts, numbers."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_string(kind):
        return [_text(value) for value in array.to_pylist()]
    if pa.types.is_struct(kind):
        columns = {field.name: _values(array.field(index)) for index, field in enumerate(kind)}
        valid = array.is_valid().to_pylist()
        return [
            {name: values[i] for name, values in columns.items()} if there else None for i, there in enumerate(valid)
        ]
    if pa.types.is_list(kind):
        inside, bounds = array.values, array.offsets.to_pylist()
        if pa.types.is_struct(kind.value_type):
            parts: Any = _values(inside)
        elif inside.null_count and not pa.types.is_floating(kind.value_type):
            raise BadRow("lists of numbers must hold no null, got one.")
        else:
            parts = inside.to_numpy(zero_copy_only=False)
        ends = zip(array.is_valid().to_pylist(), bounds, bounds[1:], strict=False)
        return [parts[start:end] if there else None for there, start, end in ends]
    return list(array.to_pylist())


def _text(value: str | None) -> str | None:
    try:
        return from_storable(value)
    except ValueError as error:
        raise BadRow(f"text must be escaped as an export escapes it, got {shortened(value)} ({error}).") from None
