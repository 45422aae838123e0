"""Runs the policy's SQL on a real SQLite database that it can only read, for tools and for rewards.

Copy this file into the folder of your own environment, which imports it by its name.
"""

import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pydantic.dataclasses
from pydantic import PositiveFloat, PositiveInt

from agentloop import Environment, tool
from agentloop.errors import UserError

Value = None | int | float | str | bytes
_DIGITS = 9


class QueryFailed(ValueError):
    """A query is wrong, forbidden or too expensive. The text is for the author of the query."""


@pydantic.dataclasses.dataclass(frozen=True)
class SqlLimits:
    """Limits of one query."""

    seconds: PositiveFloat = 2.0
    """Wall-clock seconds after the query is prepared."""
    rows: PositiveInt = 50
    """Rows of the result; further rows are left out."""
    characters: PositiveInt = 4000
    """Characters of the result as text; further characters are left out."""
    value_bytes: PositiveInt = 50_000
    """Bytes of one row, text or blob, intermediate ones too; a longer value ends the query."""
    query_characters: PositiveInt = 4000


@dataclass(frozen=True)
class QueryResult:
    """The rows of a query, in the order of the database."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    complete: bool
    """False: there were more rows than `SqlLimits.rows`."""
    limits: SqlLimits

    def same_rows(self, other: Self, *, in_order: bool = False) -> bool:
        """True if both results are complete and hold the same rows equally often; numbers count to nine digits."""
        if not (self.complete and other.complete):
            return False
        mine, others = ([tuple(map(_comparable, row)) for row in result.rows] for result in (self, other))
        return mine == others if in_order else Counter(mine) == Counter(others)

    def observation(self) -> str:
        """Write the result for the policy: one line of column names, then one line per row."""
        lines = [" | ".join(self.columns), *(" | ".join(map(_shown, row)) for row in self.rows)]
        text = "\n".join(lines if self.rows else [*lines, "(no rows)"])
        if len(text) > self.limits.characters:
            return f"{text[: self.limits.characters]}...\n[cut: more than {self.limits.characters} characters]"
        return text if self.complete else f"{text}\n[cut: more than {self.limits.rows} rows]"


def _shown(value: Value) -> str:
    """Write a value as SQL does, but text without quotes."""
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return "NULL" if value is None else str(value)


def _comparable(value: Value) -> Value:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{_DIGITS}g}")
    return value


_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
_PRAGMAS = frozenset(
    {"table_info", "table_xinfo", "table_list", "foreign_key_list", "index_list", "index_info", "index_xinfo"}
)
"""Allowed PRAGMAs: each only describes tables."""
_FUNCTIONS_REFUSED = frozenset({"load_extension", "fts3_tokenizer", "printf", "format"})
"""Forbidden functions. The last two can pad a text for minutes, and no limit ends them."""
_FAULTS_OF_FILES = frozenset(
    {
        *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CANTOPEN),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_FULL),
    }
)
"""SQLite's codes for trouble with the file or the disk. Any other code is the query's fault, even SQLITE_SCHEMA: a
syntax error has this code until a first query has read the schema."""
_INSTRUCTIONS = 10_000
"""SQLite instructions between two checks of the clock; each check has to wait for Python's global lock."""
_SCHEMA = (
    "SELECT sql FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite~_%' ESCAPE '~' "
    "ORDER BY rowid"
)


class ReadOnlyDatabase:
    """A database file that queries can only read, within limits; threads may share the object."""

    def __init__(self, path: str | os.PathLike[str], limits: SqlLimits | None = None) -> None:
        """Raises UserError if the file is no readable database."""
        self.path = Path(path).absolute()
        self.limits = limits or SqlLimits()
        try:
            self.schema()
        except sqlite3.Error as error:
            raise UserError(
                f"database must be an SQLite file that can be read, got {os.fspath(path)!r} ({error}). "
                "Name another file, or make it."
            ) from error

    def query(self, sql: str) -> QueryResult:
        """Run one statement. Raises QueryFailed for a fault of the query, sqlite3.Error for a fault of the file."""
        limits = self.limits
        if len(sql) > limits.query_characters:
            raise QueryFailed(f"the query is longer than {limits.query_characters} characters")
        bounds = _bounds(limits)
        if not _can_be_prepared(self._uri, sql, bounds):
            raise QueryFailed("stopped: WITH tables that name each other often take too much to prepare")
        refusals: list[str] = []
        with closing(self._opened(bounds, refusals)) as connection:
            deadline = time.monotonic() + limits.seconds
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _INSTRUCTIONS)
            try:
                cursor = connection.execute(sql)
                rows: list[tuple[Value, ...]] = cursor.fetchmany(limits.rows + 1)
            except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: NUL or a lone surrogate
                if time.monotonic() > deadline:
                    raise QueryFailed(f"stopped: it took longer than {limits.seconds:g} s") from error
                if refusals:
                    raise QueryFailed(f"the database can only be read: {refusals[0]} is refused") from error
                if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _FAULTS_OF_FILES:
                    raise
                raise QueryFailed(" ".join(str(error).split()) or type(error).__name__) from error
        if cursor.description is None:
            raise QueryFailed("the query must be a SELECT, got nothing that gives rows")
        columns = tuple(str(name) for name, *_ in cursor.description)
        return QueryResult(columns, tuple(rows[: limits.rows]), len(rows) <= limits.rows, limits)

    def schema(self) -> str:
        """Return the statements that created the tables and views, for a prompt."""
        with closing(sqlite3.connect(self._uri, uri=True)) as connection:
            return "\n".join(f"{sql};" for (sql,) in connection.execute(_SCHEMA))

    @property
    def _uri(self) -> str:
        return f"{self.path.as_uri()}?mode=ro"

    def _opened(self, bounds: dict[int, int], refusals: list[str]) -> sqlite3.Connection:
        """Open a connection that can only read; each refused action is appended to `refusals`."""
        connection = sqlite3.connect(self._uri, uri=True, isolation_level=None)
        for bound, most in bounds.items():
            connection.setlimit(bound, most)
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA temp_store = FILE")  # sorting must not use this process's memory
        connection.text_factory = _text

        def authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
            refusal = _refusal(action, first or "", second or "")
            if refusal is None:
                return sqlite3.SQLITE_OK
            refusals.append(refusal)
            return sqlite3.SQLITE_DENY

        connection.set_authorizer(authorize)
        return connection


def _bounds(limits: SqlLimits) -> dict[int, int]:
    """Return limits for SQLite itself, under which no single instruction takes long."""
    return {
        sqlite3.SQLITE_LIMIT_LENGTH: limits.value_bytes,
        sqlite3.SQLITE_LIMIT_COLUMN: 200,
        sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
        sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
        sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 50,
        sqlite3.SQLITE_LIMIT_ATTACHED: 0,
        sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
        sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
    }


def _text(stored: bytes) -> str:
    """Decode text; bytes that are no UTF-8 become replacement characters."""
    return stored.decode("utf-8", "replace")


def _refusal(action: int, first: str, second: str) -> str | None:
    """Name an action that is refused; None for an action that only reads."""
    if action == sqlite3.SQLITE_FUNCTION:
        name = second.lower()
        return f"function {name}" if name in _FUNCTIONS_REFUSED else None
    if action == sqlite3.SQLITE_PRAGMA:
        name = first.lower()
        return None if name in _PRAGMAS else f"PRAGMA {name}"
    return None if action in _READING else "anything but SELECT"


_MAY_GROW = re.compile(r"\bwith\b", re.IGNORECASE)
_SECONDS_TO_BEGIN = 20.0
"""Wall-clock seconds to prepare a query. They exceed the CPU seconds, because a busy machine may be slow to begin."""
_TOO_MUCH = 9
# SQLite copies a WITH table at each mention. Thirty tables that each mention the one before twice make a billion
# copies before the first instruction runs. Nothing can interrupt that, so another process prepares the query first.
_PREPARING = f"""\
import json, resource, sqlite3, sys
asked = json.load(sys.stdin)
for kind, most in ((resource.RLIMIT_AS, 256 << 20), (resource.RLIMIT_CPU, 1), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (most, most))
connection = sqlite3.connect(asked["uri"], uri=True)
for limit, value in asked["limits"]:
    connection.setlimit(limit, value)
connection.set_progress_handler(lambda: 1, 1)
try:
    connection.execute(asked["query"])
except MemoryError:
    sys.exit({_TOO_MUCH})
except (sqlite3.Error, sqlite3.Warning, ValueError):
    pass  # interrupted on purpose; or wrong, which the real run reports
"""


def _can_be_prepared(uri: str, query: str, limits: Mapping[int, int]) -> bool:
    """True if another process prepares the query within a second and 256 MiB, or finds that the query is wrong."""
    if not _MAY_GROW.search(query):
        return True
    command = [sys.executable, "-I", "-S", "-c", _PREPARING]
    asked = json.dumps({"uri": uri, "query": query, "limits": list(limits.items())}).encode()
    try:
        done = subprocess.run(command, input=asked, capture_output=True, timeout=_SECONDS_TO_BEGIN, check=False)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, _TOO_MUCH) and done.returncode > 0:
        raise RuntimeError(f"{sys.executable} must prepare queries, got {done.stderr.decode(errors='replace')[-300:]}")
    return done.returncode == 0


class SqlQueries(Environment):
    """Base class with the tool `run_sql`; tasks and rewards may also query `self.database`."""

    def __init__(self, *, database: str, limits: SqlLimits | None = None) -> None:
        self.database = ReadOnlyDatabase(database, limits)

    @tool
    def run_sql(self, query: str) -> str:
        """Run one SQL query on the database, which can only be read, and see its rows.

        Args:
            query: One SELECT statement in SQLite's dialect.
        """
        try:
            return self.database.query(query).observation()
        except QueryFailed as error:
            return f"[{error}]"
