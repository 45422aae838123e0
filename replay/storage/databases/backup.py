"""The copy of a SQLite file that is kept before it is migrated."""

from __future__ import annotations

import glob
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from replay.errors import DatabaseRefused


def backup_path(path: Path, revision: str) -> Path:
    """Where a database of that schema is kept before it is migrated."""
    return path.with_name(f"{path.name}.schema-{revision}.backup")


def backups(path: Path) -> list[Path]:
    """The copies that migrations of a database have left beside it."""
    pattern = backup_path(path.with_name(glob.escape(path.name)), "*").name
    return sorted(path.parent.glob(pattern))


def back_up(path: Path, revision: str) -> Path:
    """A whole copy on the disk, or none, of what is committed; made by whoever holds the write lock.

    A copy that is there already is of a migration that was killed, and is made once more: so is one that is unfinished.
    """
    target = backup_path(path, revision)
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        os.close(os.open(unfinished, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600))
        whole = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(whole, uri=True)) as source, closing(sqlite3.connect(unfinished)) as copy:
            # What is unfinished is made anew, and needs no journal that a kill would leave.
            copy.execute("PRAGMA journal_mode=OFF")
            source.backup(copy)
        flush(unfinished)
        os.replace(unfinished, target)
        flush(target.parent)
    except (OSError, sqlite3.Error) as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise DatabaseRefused(
            f"database must be copied before it is migrated, got {error} at {target}. Make room beside it."
        ) from error
    return target


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
