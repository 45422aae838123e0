"""Runs SQL that a policy wrote on a real SQLite database that it can only read: for tools, and for rewards."""

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

from agentloop.environments.environment import Environment, tool
from agentloop.errors import UserError

Value = None | int | float | str | bytes
_DIGITS = 9


class QueryFailed(ValueError):
    """A query that is wrong, may not be run, or takes too much. The text is for whoever wrote it."""


@pydantic.dataclasses.dataclass(frozen=True)
class SqlLimits:
    """What one query may take."""

    seconds: PositiveFloat = 2.0
    """Seconds of the clock, once the query is prepared."""
    rows: PositiveInt = 50
    """Rows that it gives; the others are left out."""
    characters: PositiveInt = 4000
    """Characters of its rows as text; what is beyond them is left out."""
    value_bytes: PositiveInt = 50_000
    """Bytes of one row, text or blob, also of those in between; a query with a longer one ends."""
    query_characters: PositiveInt = 4000


@dataclass(frozen=True)
class QueryResult:
    """The rows of a query, in the order in which the database gave them."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    complete: bool
    """False: there were more rows than `SqlLimits.rows`."""
    limits: SqlLimits

    def same_rows(self, other: Self, *, in_order: bool = False) -> bool:
        """True if both are complete and hold the same rows, each as often, with numbers compared to nine digits."""
        if not (self.complete and other.complete):
            return False
        mine, others = ([tuple(map(_comparable, row)) for row in result.rows] for result in (self, other))
        return mine == others if in_order else Counter(mine) == Counter(others)

    def observation(self) -> str:
        """A line of names and a line for each row: what a policy is shown."""
        lines = [" | ".join(self.columns), *(" | ".join(map(_shown, row)) for row in self.rows)]
        text = "\n".join(lines if self.rows else [*lines, "(no rows)"])
        if len(text) > self.limits.characters:
            return f"{text[: self.limits.characters]}...\n[cut: more than {self.limits.characters} characters]"
        return text if self.complete else f"{text}\n[cut: more than {self.limits.rows} rows]"


def _shown(value: Value) -> str:
    """As SQL writes it, but text without quotes."""
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
"""Those that only describe tables."""
_FUNCTIONS_REFUSED = frozenset({"load_extension", "fts3_tokenizer", "printf", "format"})
"""The last two fill any width, a character at a time, for minutes that no limit ends."""
_FAULTS_OF_FILES = frozenset(
    {
        *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CANTOPEN),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_FULL),
    }
)
"""SQLite's codes for trouble with the file or the disk. Any other is the query's, also SQLITE_SCHEMA: a syntax error
has it where no query before has read the schema."""
_INSTRUCTIONS = 10_000
"""Instructions of SQLite between two looks at the clock, each of which waits for the interpreter's lock."""
_SCHEMA = (
    "SELECT sql FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite~_%' ESCAPE '~' "
    "ORDER BY rowid"
)


class ReadOnlyDatabase:
    """A database file that queries can only read, up to their limits; threads may share it."""

    def __init__(self, path: str | os.PathLike[str], limits: SqlLimits | None = None) -> None:
        """Raises UserError where there is no database that can be read."""
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
        """The rows of one statement. Raises QueryFailed for a fault of the query, sqlite3.Error for one of the file."""
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
        """The statements that made its tables and views, for a prompt."""
        with closing(sqlite3.connect(self._uri, uri=True)) as connection:
            return "\n".join(f"{sql};" for (sql,) in connection.execute(_SCHEMA))

    @property
    def _uri(self) -> str:
        return f"{self.path.as_uri()}?mode=ro"

    def _opened(self, bounds: dict[int, int], refusals: list[str]) -> sqlite3.Connection:
        """A connection that can only read; what it refuses is named in `refusals`."""
        connection = sqlite3.connect(self._uri, uri=True, isolation_level=None)
        for bound, most in bounds.items():
            connection.setlimit(bound, most)
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA temp_store = FILE")  # what it sorts or queues is no memory of this program
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
    """SQLite's own limits; with these no single instruction of a query takes long."""
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
    """Text that is no UTF-8 is shown with replacements rather than refused."""
    return stored.decode("utf-8", "replace")


def _refusal(action: int, first: str, second: str) -> str | None:
    """What an action of a query is called where it is refused; None where it only reads."""
    if action == sqlite3.SQLITE_FUNCTION:
        name = second.lower()
        return f"function {name}" if name in _FUNCTIONS_REFUSED else None
    if action == sqlite3.SQLITE_PRAGMA:
        name = first.lower()
        return None if name in _PRAGMAS else f"PRAGMA {name}"
    return None if action in _READING else "anything but SELECT"


_MAY_GROW = re.compile(r"\bwith\b", re.IGNORECASE)
_SECONDS_TO_BEGIN = 20.0
"""Seconds of the clock; those of the processor are fewer, for a busy machine may be slow to begin."""
_TOO_MUCH = 9
# SQLite copies a common table expression wherever it is named: thirty that each name the one before twice are a billion
# copies, made before the first instruction runs, and nothing can interrupt that.
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
    pass  # interrupted, as it was to be; or wrong, which is found where it is run
"""


def _can_be_prepared(uri: str, query: str, limits: Mapping[int, int]) -> bool:
    """True for a query that another process prepares within a second and 256 MiB, and for one that is wrong."""
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
    """Base class with the tool `run_sql`; tasks and rewards may query `self.database` too."""

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
