"""Databases as the agentloop of an earlier schema left them: the same experience every time, kept here as SQL.

The rows stand in the file of SQLite alone, and are copied to a server.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from replay.storage.databases import Location
from replay.storage.format.encoding import decompress_text
from tests.fakes.records import sql

SCHEMAS = Path(__file__).with_name("schemas")
REVISIONS = sorted(folder.name for folder in SCHEMAS.iterdir())
_TABLES = (
    *("replay_schema_version", "buffer_state", "runs", "policies", "tasks", "groups", "trajectories", "segments"),
    *("messages", "draws"),
)
"""Those with rows, each after the ones it names."""


def fill_old(location: Location, revision: str) -> list[str]:
    """An empty database becomes one of that schema; the ids of its trajectories."""
    with closing(sqlite3.connect(":memory:")) as source:
        source.executescript((SCHEMAS / revision / "sqlite.sql").read_text())
        if isinstance(location, Path):
            with closing(sqlite3.connect(location)) as target:
                source.backup(target)
        else:
            sql(location, (SCHEMAS / revision / "postgresql.sql").read_text())
            for name in _TABLES:
                _copy(source, name, location)
        return [id for (id,) in source.execute("select id from trajectories")]


def _copy(source: sqlite3.Connection, name: str, url: str) -> None:
    columns = [row[1] for row in source.execute(f"pragma table_info({name})")]
    marks = ", ".join("?" for _ in columns)
    for row in source.execute(f"select {', '.join(columns)} from {name}"):
        values = [_of_server(column, value) for column, value in zip(columns, row, strict=True)]
        sql(url, f"insert into {name} ({', '.join(columns)}) values ({marks})", *values)


def _of_server(column: str, value: Any) -> Any:
    """Texts are compressed in files only."""
    if column == "said":
        return decompress_text(value)
    return bool(value) if column in ("success", "ended") else value
