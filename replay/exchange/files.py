"""Files of rows: which format a file has, how it is written whole or not at all, and how it is read in small parts."""

import codecs
import gzip
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from replay.errors import ReplayError
from replay.exchange.json_text import BadRow
from replay.storage.databases.disk import flush

_Row = TypeVar("_Row")
JSONL = (".jsonl", ".jsonl.gz")
PARQUET = ".parquet"
MOST_LINE = 32 << 20
"""Most bytes of one JSONL line: a trajectory of about a million tokens."""
ROWS_AT_ONCE = 64
_BYTES_AT_ONCE = 8 << 20
"""Most bytes of rows in memory together, unless one row alone is larger."""


class ExchangeError(ReplayError):
    """A file that can't be read or written; nothing has been stored."""


def batched(rows: Iterable[_Row], size: Callable[[_Row], int]) -> Iterator[list[_Row]]:
    """The rows in batches that fit in memory and in one transaction; `size` returns the bytes of a row."""
    batch: list[_Row] = []
    taken = 0
    for row in rows:
        mine = size(row)
        if batch and (len(batch) == ROWS_AT_ONCE or taken + mine > _BYTES_AT_ONCE):
            yield batch
            batch, taken = [], 0
        batch.append(row)
        taken += mine
    if batch:
        yield batch


def is_parquet(path: Path) -> bool:
    """Whether the file is Parquet by its name; False: JSONL. Raises ExchangeError if it is neither."""
    name = path.name.lower()
    if name.endswith((PARQUET, *JSONL)):
        return name.endswith(PARQUET)
    raise ExchangeError(
        f"FILE must end in {', '.join(JSONL)} or {PARQUET}, got {str(path)!r}. Rename it by its format: JSONL is one "
        "row a line."
    )


def is_packed(path: Path) -> bool:
    return path.name.lower().endswith(".gz")


@contextmanager
def replaced(path: Path, *, force: bool) -> Iterator[Path]:
    """A temporary file, readable by its owner only, that takes the name `path` when the block ends without an error."""
    _refuse_existing(path, force)
    if path.is_dir():
        raise ExchangeError(f"FILE must be a file, got the folder {str(path)!r}. Name a file in it.")
    try:
        number, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".unfinished", dir=path.parent)
        os.close(number)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    unfinished = Path(name)
    try:
        yield unfinished
        flush(unfinished)
        _refuse_existing(path, force)
        os.replace(unfinished, path)
        flush(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _refuse_existing(path: Path, force: bool) -> None:
    if not force and os.path.lexists(path):
        raise ExchangeError(f"FILE must not exist, got {str(path)!r}. Choose another name, or overwrite with --force.")


def _unwritable(path: Path, error: Exception) -> ExchangeError:
    return ExchangeError(f"FILE must be writable, got {str(path)!r} ({_reason(error)}). Choose another.")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file. Pipes and devices are refused, for a file is read more than once."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ExchangeError(f"FILE must be a file, got {str(path)!r}, which is not one. Name a file.")
        raw = path.open("rb")
    except (OSError, ValueError) as error:
        raise ExchangeError(f"FILE must be readable, got {str(path)!r} ({_reason(error)}). Check its name.") from error
    with raw:
        yield raw


def lines(path: Path) -> Iterator[bytes]:
    """The lines of a JSONL file, packed or not.

    Raises ExchangeError for another kind of file, and BadRow for a line that is too long or damaged.
    """
    if is_parquet(path):
        raise ExchangeError(f"FILE must end in {', '.join(JSONL)}, got {str(path)!r}. Write one row a line.")
    with opened(path) as raw:
        stream = gzip.GzipFile(fileobj=raw, mode="rb") if is_packed(path) else raw
        try:
            mark = codecs.BOM_UTF8  # some editors begin a file with it
            while line := stream.readline(MOST_LINE + 1):
                line, mark = line.removesuffix(b"\n").removeprefix(mark), b""
                if len(line) > MOST_LINE:
                    raise BadRow(f"line must be at most {MOST_LINE:,} bytes, got more. Leave it out.")
                yield line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadRow(f"contents must unpack, got a damaged or cut file ({str(error).splitlines()[0]}).") from None
