"""Exchanged rows as Parquet: the columns of JSONL in their own types, lists of numbers, NaN for unknown log-probs."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import IO, Any, Literal, get_args, get_origin

import numpy as np
from pydantic import BaseModel

from replay.errors import shortened
from replay.exchange.files import ExchangeError, batched, longest_line, opened, within
from replay.exchange.row_format import ARRAYS, BadRow, Bundle, ExchangedRow, PlainRow, from_plain, json_line, to_plain
from replay.storage.format.column_types import from_storable, to_storable

_GROUP_ROWS = 64
_GROUP_BYTES = 8 << 20
"""Rows are written a row group at a time: about as much goes into one, and never less than a row."""
MOST_MEMORY = 512 << 20
"""Bytes that reading a file may take, in a process of its own ..."""
_SECONDS = 30
_BYTES_A_SECOND = 1 << 16
"""... and the processor time: so many seconds, and one for each of so many bytes."""
_PIPE = 1 << 20
_PROGRAM = Path(__file__).with_name("parquet_lines.py")
_INHERITED = ("HOME", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE")
"""What finding pyarrow may need of our environment; threads and devices of ours are none of its business."""
_ALONE = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
_REPEATED = ["run_name", "run_config", "run_authors", "run_authors_hash", "run_code_version", "run_fingerprint"]
"""Columns that are the same in many rows: stored once per row group."""


def write(target: Path, bundles: Iterable[Bundle]) -> int:
    """The rows to `target`; the same bytes for the same rows and the same version of pyarrow. How many."""
    _check_installed()
    import pyarrow as pa
    import pyarrow.parquet as pq

    from replay.exchange.parquet_lines import schema as schema_of

    schema = schema_of(_described(ExchangedRow))
    count = 0
    options: dict[str, Any] = {
        "compression": "zstd",
        "use_dictionary": _REPEATED,
        "store_schema": False,
        "write_page_checksum": True,
    }
    with pq.ParquetWriter(target, schema, **options) as writer:
        for rows in batched(map(to_plain, bundles), _size, most=_GROUP_ROWS, room=_GROUP_BYTES):
            arrays = [_pa_array(pa, [row[field.name] for row in rows], field.type) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=len(rows))
            count += len(rows)
    return count


def read(path: Path) -> Iterator[Bundle | BadRow]:
    """Every row, or what is wrong with it; raises BadRow for a file that is no Parquet of these columns.

    Another process reads it, under limits of memory and time: a file that takes more, or ends that process, is bad.
    """
    _check_installed()
    with opened(path) as raw, tempfile.TemporaryFile() as complaints:
        size = os.fstat(raw.fileno()).st_size
        seconds = _SECONDS + size // _BYTES_A_SECOND
        asked = {"columns": _described(ExchangedRow), "bytes": MOST_MEMORY, "seconds": seconds}
        command = [sys.executable, "-P", str(_PROGRAM), json.dumps(asked)]
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ} | _ALONE
        with subprocess.Popen(
            command, stdin=raw, stdout=subprocess.PIPE, stderr=complaints, env=environment, pipesize=_PIPE
        ) as reader:
            assert reader.stdout is not None
            try:
                yield from _rows(reader.stdout, longest_line(size))
                if reader.wait():
                    raise BadRow(_ended(reader.returncode, complaints, seconds))
            finally:
                reader.kill()


def _ended(code: int, complaints: IO[bytes], seconds: int) -> str:
    """What became of a reader that did not reach the end of the file."""
    complaints.seek(0)
    complaint_lines = complaints.read().decode(errors="replace").splitlines()
    why = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return (
        f"contents must be readable in {MOST_MEMORY:,} bytes and {seconds:,} seconds, got a reader that ended with "
        f"{why} ({shortened(complaint_lines[-1] if complaint_lines else '')}). "
        "Export smaller row groups or JSONL where it was made."
    )


def _rows(lines: IO[bytes], longest: int) -> Iterator[Bundle | BadRow]:
    while line := lines.readline(longest + 1):
        if not within(line, longest).endswith(b"\n"):
            return
        row = json_line(line, constants=True)
        if isinstance(row, str):
            raise BadRow(row)
        try:
            yield from_plain(_restored(row))
        except BadRow as error:
            yield error


def _restored(row: PlainRow) -> PlainRow:
    """The row with its arrays and texts as `to_plain` gave them."""
    for part in filter(None, row["segments"] or ()):
        for name, dtype in ARRAYS.items():
            if part[name] is not None:
                part[name] = np.frombuffer(base64.b64decode(part[name]), dtype)
    return {name: _texts(value) for name, value in row.items()}


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return from_storable(value)
        except ValueError as error:
            raise BadRow(f"text must be escaped as an export escapes it, got {shortened(value)} ({error}).") from None
    if isinstance(value, list):
        return [_texts(part) for part in value]
    return {name: _texts(part) for name, part in value.items()} if isinstance(value, dict) else value


def _check_installed() -> None:
    if find_spec("pyarrow") is None:
        raise ExchangeError(
            "Parquet must have pyarrow installed, got none. Install the extra: "
            "pip install 'agentloop-replay[parquet]', or use .jsonl."
        )


def _described(part: type[BaseModel]) -> list[tuple[str, Any]]:
    """Name and kind of its columns, for `parquet_lines`."""
    return [
        (name, ARRAYS[name].__name__ if name in ARRAYS else _kind(field.annotation))
        for name, field in part.model_fields.items()
    ]


def _kind(annotation: Any) -> Any:
    """A column that may be unknown is of the kind it has when known; a list has its parts' columns, JSON is a text."""
    args = [kind for kind in get_args(annotation) if kind is not NoneType]
    if get_origin(annotation) is list:
        return _described(args[0])
    if get_origin(annotation) is Literal:
        return type(args[0]).__name__
    return "str" if get_origin(annotation) is dict else _kind(args[0]) if args else annotation.__name__


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
