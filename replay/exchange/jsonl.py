"""Exchanged rows as lines of JSON. A number is the shortest decimal that reads back as the same float32; unknown is
null."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from context.tokens.token_sequence import TOKEN_FIELDS
from replay.exchange.files import MOST_LINE, ExchangeError, is_packed, lines
from replay.exchange.json_text import BadRow, json_line
from replay.exchange.row_format import Bundle, PlainRow, from_plain, to_plain


def write(path: Path, target: Path, bundles: Iterable[Bundle], line_of: Callable[[Bundle], bytes]) -> None:
    """Write the rows to `target`, packed if `path` ends in .gz. The bytes depend on the rows alone."""
    with target.open("wb") as raw, _packing(raw) if is_packed(path) else nullcontext(raw) as stream:
        for bundle in bundles:
            line = line_of(bundle)
            if len(line) > MOST_LINE:
                raise ExchangeError(
                    f"row must be at most {MOST_LINE:,} bytes as JSON, got {len(line):,} for trajectory "
                    f"{bundle.trajectory.id}. Export Parquet, or leave it out."
                )
            stream.write(line + b"\n")


def _packing(raw: IO[bytes]) -> gzip.GzipFile:
    return gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0)


def read(path: Path) -> Iterator[Bundle | BadRow]:
    """The row of every line, or the problem with it. Raises BadRow if no later line can be read."""
    for line in lines(path):
        try:
            yield decode(line)
        except BadRow as error:
            yield error


def encode(bundle: Bundle) -> bytes:
    row = to_plain(bundle)
    for parts in ("segments", "nodes"):
        row[parts] = [{**part, **{name: _numbers(part[name]) for name in TOKEN_FIELDS}} for part in row[parts]]
    text = _dumps(row)
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8, but it has an escape
        return _dumps(row, ensure_ascii=True).encode()


def decode(line: bytes) -> Bundle:
    return from_plain(json_line(line))


def _dumps(row: PlainRow, *, ensure_ascii: bool = False) -> str:
    return json.dumps(row, ensure_ascii=ensure_ascii, separators=(",", ":"), allow_nan=False)


def _numbers(array: npt.NDArray[Any]) -> list[Any]:
    if array.dtype != np.float32:
        return list(array.tolist())
    known = ~np.isnan(array)
    shortest = iter(_shortest(array[known]))
    return [next(shortest) if there else None for there in known.tolist()]


def _shortest(array: npt.NDArray[np.float32]) -> list[float]:
    """Floats that Python writes as the shortest decimals that read back as the same float32."""
    numbers = array.astype(np.str_).astype(np.float64)
    exact = numbers.astype(np.float32).view(np.uint32) == array.view(np.uint32)
    # On its way through a double, a decimal may round to the neighbouring float32.
    return list(np.where(exact, numbers, array.astype(np.float64)).tolist())
