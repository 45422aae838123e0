"""Which file holds what, and how it is written and read: whole or not at all, and never more than fits in memory."""

from __future__ import annotations

import gzip
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal, TypeVar

import zstandard

from replay.errors import ReplayError
from replay.exchange.row_format import BadRow
from replay.storage.databases.disk import flush

_Line = TypeVar("_Line", bytes, bytearray)
_Row = TypeVar("_Row")
Packing = Literal["", "gz", "zst"]
_PACKINGS: dict[str, Packing] = {".jsonl": "", ".jsonl.gz": "gz", ".jsonl.zst": "zst"}
PARQUET = ".parquet"
_RUN_CODE = (".pickle", ".pkl", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".dill", ".npy", ".npz", ".h5", ".model")
"""Formats that may run code of their author's when they are read."""

MOST_LINE = 32 << 20
"""Bytes of one JSONL line, as `size_of` counts them: a trajectory of about a million tokens."""
_OVERHEAD = 48
_AT_ONCE = 1 << 16
_ZSTD_AT_ONCE = 128
"""Packed bytes: four of them can stand for 128 kB."""
_MOST_WINDOW = 8 << 20
"""Bytes a zstd frame may ask for; level 19 does, `--ultra` and `--long` ask for more."""
_MOST_RATIO = 64
_FLOOR = 4 << 20
"""A line of a packed file may have this many times the file's bytes, and always this many."""


class ExchangeError(ReplayError):
    """A file that can't be read or written; nothing has been stored."""


def batched(rows: Iterable[_Row], size: Callable[[_Row], int], *, most: int, room: int) -> Iterator[list[_Row]]:
    """At most so many rows at a time, and as many as there is room for, but never less than one."""
    batch: list[_Row] = []
    taken = 0
    for row in rows:
        mine = size(row)
        if batch and (len(batch) == most or taken + mine > room):
            yield batch
            batch, taken = [], 0
        batch.append(row)
        taken += mine
    if batch:
        yield batch


def is_parquet(path: Path) -> bool:
    """False: JSONL. Raises ExchangeError for a name that says neither, before the file is opened."""
    name = path.name.lower()
    if name.endswith((PARQUET, *_PACKINGS)):
        return name.endswith(PARQUET)
    if any(name.endswith((ending, f"{ending}.gz", f"{ending}.zst")) for ending in _RUN_CODE):
        raise ExchangeError(
            f"FILE must be a format that can't run code, got {str(path)!r}: reading it could run whatever its author "
            "wrote. Export JSONL or Parquet where it was made."
        )
    raise ExchangeError(
        f"FILE must end in {', '.join(_PACKINGS)} or {PARQUET}, got {str(path)!r}. Name it for what it holds: JSONL is "
        "one row a line."
    )


def _packing(path: Path) -> Packing:
    name = path.name.lower()
    return next(packing for ending, packing in _PACKINGS.items() if name.endswith(ending))


@contextmanager
def replaced(path: Path, *, force: bool) -> Iterator[Path]:
    """A file to write in its place, for its owner only; it takes the name when the block ends, and not before."""
    _refuse_existing(path, force)
    if path.is_dir():
        raise ExchangeError(f"FILE must be a file, got the folder {str(path)!r}. Name a file in it.")
    try:
        number, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".unfinished", dir=path.parent)
    except (OSError, ValueError) as error:
        raise ExchangeError(f"FILE must be writable, got {str(path)!r} ({_reason(error)}). Choose another.") from error
    os.close(number)
    unfinished = Path(name)
    try:
        yield unfinished
        flush(unfinished)
        _refuse_existing(path, force)
        os.replace(unfinished, path)
        flush(path.parent)
    except OSError as error:
        raise ExchangeError(f"FILE must be writable, got {str(path)!r} ({_reason(error)}). Choose another.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _refuse_existing(path: Path, force: bool) -> None:
    if not force and os.path.lexists(path):
        raise ExchangeError(f"FILE must not exist, got {str(path)!r}. Choose another name, or overwrite with --force.")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextmanager
def packed(path: Path, target: Path) -> Iterator[IO[bytes]]:
    """Write to `target` as the ending of `path` says; the same bytes on every day and machine."""
    packing = _packing(path)
    with target.open("wb") as raw:
        if packing == "gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as stream:
                yield stream  # type: ignore[misc]  # a stream of bytes by another name
        elif packing == "zst":
            with zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(raw, closefd=False) as stream:
                yield stream
        else:
            yield raw


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, as they are. Pipes and devices are none: a file is read more than once."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ExchangeError(f"FILE must be a file, got {str(path)!r}, which is none. Name a file.")
        raw = path.open("rb")
    except (OSError, ValueError) as error:
        raise ExchangeError(f"FILE must be readable, got {str(path)!r} ({_reason(error)}). Check it.") from error
    with raw:
        yield raw


def lines(path: Path) -> Iterator[bytes]:
    """The lines of a JSONL file, packed or not; raises ExchangeError for a file of another kind.

    Raises BadRow for one that is too long, and for contents that are damaged: what is packed is unpacked piece by
    piece, and a small file can't hold a long line.
    """
    if is_parquet(path):
        raise ExchangeError(f"FILE must end in {', '.join(_PACKINGS)}, got {str(path)!r}. Write one row a line.")
    line = bytearray()
    with opened(path) as raw:
        packing = _packing(path)
        longest = longest_line(os.fstat(raw.fileno()).st_size) if packing else MOST_LINE
        for piece in _pieces(raw, packing):
            start = 0
            while (end := piece.find(b"\n", start)) >= 0:
                line += piece[start:end]
                yield bytes(within(line, longest))
                line.clear()
                start = end + 1
            line += piece[start:]
            if len(line) > longest:
                within(line, longest)
    if line:
        yield bytes(within(line, longest))


def longest_line(size: int) -> int:
    """Bytes of a line that a packed file of so many bytes may hold."""
    return min(MOST_LINE, max(_FLOOR, _MOST_RATIO * size))


def within(line: _Line, longest: int) -> _Line:
    """The line; raises BadRow where it is too long."""
    if (1 + _OVERHEAD) * len(line) > longest and size_of(line) > longest:
        raise BadRow(f"line must be at most {longest:,} bytes in this file, got more. Unpack it, or leave it out.")
    return line


def size_of(line: bytes | bytearray) -> int:
    """Bytes of a line of JSON, where each object, list and text counts as what it takes in memory: `{},` is not 3."""
    parts = line.count(b"{") + line.count(b"[") + line.count(b'"') - line.count(b'\\"')
    return len(line) + _OVERHEAD * parts


def _pieces(raw: IO[bytes], packing: Packing) -> Iterator[bytes]:
    try:
        if packing == "zst":
            yield from _unpacked_frames(raw)
            return
        stream = gzip.GzipFile(fileobj=raw, mode="rb") if packing == "gz" else raw
        while piece := stream.read(_AT_ONCE):
            yield piece
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise BadRow(f"contents must unpack, got a damaged or cut file ({str(error).splitlines()[0]}).") from None


def _unpacked_frames(raw: IO[bytes]) -> Iterator[bytes]:
    """Frame by frame, a few bytes at a time.

    zstandard ignores limits of size where a frame declares its own, and its streams end without a word where a
    file is cut.
    """
    reader = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
    frame = None
    while piece := raw.read(_ZSTD_AT_ONCE):
        while piece:
            frame = frame or reader.decompressobj()
            yield frame.decompress(piece)
            piece = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("its last frame has no end")
