"""A program of its own: the rows of the Parquet file on its stdin as lines of JSON, in bounded memory and time.

pyarrow takes whatever memory a file asks for, and damaged files can end its process: this one, and not the one that
asks. It imports nothing of the project, so that it starts at once. Arrays of numbers are base64 of their
bytes; a last line that is a text says why there are no more rows.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_ROWS_AT_ONCE = 64
_MOST_FOOTER = 16 << 20
_LONGEST_NAME = 80
_TYPES = {
    "str": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "int32": pa.list_(pa.int32()),
    "uint8": pa.list_(pa.uint8()),
    "float32": pa.list_(pa.float32()),
}

Columns = list[tuple[str, Any]]
"""Name and kind: one of the names above, or the columns of a list's parts."""


def _base64(numbers: memoryview) -> str:
    return base64.b64encode(numbers).decode()


class _Refused(Exception):
    """Why the rest of the file is not read, in one line."""


def schema(columns: Columns) -> pa.Schema:
    return pa.schema([_field(name, kind) for name, kind in columns])


def _field(name: str, kind: Any) -> pa.Field:
    parts = kind if isinstance(kind, list) else None
    return pa.field(name, _TYPES[kind] if parts is None else pa.list_(pa.struct([_field(*part) for part in parts])))


def main() -> None:
    asked = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (asked["bytes"], asked["bytes"]))
    resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"], asked["seconds"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out, encode = sys.stdout.buffer, json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_base64).encode
    try:
        for row in _rows(schema(asked["columns"])):
            out.write(encode(row).encode() + b"\n")
    except _Refused as error:
        out.write(json.dumps(str(error)).encode() + b"\n")
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        found = (str(error) or repr(error)).splitlines()[0][:200]
        out.write(json.dumps(f"contents must be Parquet, got: {found}.").encode() + b"\n")
    out.flush()


def _rows(wanted: pa.Schema) -> Iterator[dict[str, Any]]:
    with os.fdopen(os.dup(0), "rb", buffering=0) as raw:
        file = pq.ParquetFile(
            raw,
            thrift_string_size_limit=_MOST_FOOTER,
            thrift_container_size_limit=1 << 20,
            pre_buffer=False,
            buffer_size=1 << 20,
            page_checksum_verification=True,
        )
        _check_schema(file.schema_arrow, wanted)
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, use_threads=False):
            columns = {name: _values(batch.column(name)) for name in wanted.names}
            yield from ({name: values[i] for name, values in columns.items()} for i in range(batch.num_rows))


def _check_schema(found: pa.Schema, wanted: pa.Schema) -> None:
    """The columns in any order, whatever a file's writer calls the insides of a list."""
    for field in found:
        if field.name not in wanted.names:
            raise _Refused(f"columns must be those of an export, got {_shortened(field.name)}.")
        kind = wanted.field(field.name).type
        if not field.type.equals(kind):
            raise _Refused(f"{field.name} must be of type {kind}, got {_shortened(str(field.type))}.")
    missing = [name for name in wanted.names if name not in found.names]
    if missing or len(found) != len(wanted):
        raise _Refused(f"columns must hold {', '.join(map(repr, missing))}, got none.")


def _shortened(name: str) -> str:
    return repr(name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "...")


def _values(array: Any) -> list[Any]:
    """Lists of parts, numbers of an array as bytes, texts, numbers."""
    kind = array.type
    if pa.types.is_struct(kind):
        columns = {field.name: _values(array.field(index)) for index, field in enumerate(kind)}
        return [
            {name: values[i] for name, values in columns.items()} if there else None
            for i, there in enumerate(_there(array))
        ]
    if pa.types.is_list(kind):
        bounds = array.offsets.to_pylist()
        if pa.types.is_struct(kind.value_type):
            parts: Any = _values(array.values)
        else:
            parts, width = _numbers(array.values), kind.value_type.bit_width // 8
            bounds = [width * bound for bound in bounds]
        ends = zip(_there(array), bounds, bounds[1:], strict=False)
        return [parts[start:end] if there else None for there, start, end in ends]
    return list(array.to_pylist())


def _there(array: Any) -> list[bool]:
    return list(array.is_valid().to_pylist()) if array.null_count else [True] * len(array)


def _numbers(array: Any) -> memoryview:
    if array.null_count:
        if not pa.types.is_floating(array.type):
            raise _Refused("lists of numbers must hold no null, got one.")
        array = pa.array(array.to_numpy(zero_copy_only=False))
    width, there = array.type.bit_width // 8, array.buffers()[1]
    return memoryview(there or b"")[width * array.offset : width * (array.offset + len(array))]


if __name__ == "__main__":
    main()
