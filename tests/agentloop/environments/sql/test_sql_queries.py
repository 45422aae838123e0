"""A database that can only be read gives rows, and an environment that derives from `SqlQueries` shows them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentloop.environments import Task, ToolLimits
from agentloop.environments.sql import ReadOnlyDatabase, SqlLimits, SqlQueries
from agentloop.environments.tools.results import ToolResult
from agentloop.errors import UserError
from context.messages import Message, ToolCall
from tests.fakes.environments.faulty_tools import called

LIMITS = ToolLimits(timeout_s=20.0, max_chars=1000)


class Shop(SqlQueries):
    def task_from_row(self, row: Any) -> Task:
        return Task(f"{self.database.schema()}\n{row['question']}")

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return 0.0


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "the shop?.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            """
            CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL);
            INSERT INTO item VALUES (1, 'pen', 2.5), (2, 'cup', 4.0), (3, 'hat', NULL);
            CREATE TABLE sale (item INTEGER REFERENCES item, day TEXT);
            INSERT INTO sale VALUES (1, 'mon'), (1, 'tue'), (2, 'mon');
            CREATE VIEW cheap AS SELECT name FROM item WHERE price < 3;
            """
        )
    return path


def test_tool_shows_names_and_rows(shop: Path) -> None:
    environment = Shop(database=str(shop))
    joined = "SELECT name, count(*) AS n FROM item JOIN sale ON item.id = sale.item GROUP BY name ORDER BY name"
    answers = {
        joined: "name | n\ncup | 1\npen | 2",
        "SELECT name, price FROM item WHERE id = 3": "name | price\nhat | NULL",
        "SELECT * FROM cheap": "name\npen",
        "SELECT x'00ff' AS b": "b\nx'00ff'",
        "SELECT name FROM item WHERE id > 3": "name\n(no rows)",
        "SELECT CAST(x'61ff' AS TEXT) AS a": "a\na\ufffd",
        "DELETE FROM item": "[the database can only be read: anything but SELECT is refused]",
        "PRAGMA index_list(item)": "seq | name | unique | origin | partial\n(no rows)",
    }
    assert environment.database.schema().splitlines()[1:] == [
        "CREATE TABLE sale (item INTEGER REFERENCES item, day TEXT);",
        "CREATE VIEW cheap AS SELECT name FROM item WHERE price < 3;",
    ]
    for query, shown in answers.items():
        assert called(environment, ToolCall("run_sql", {"query": query}), LIMITS) == ToolResult(shown), query


def test_trouble_with_the_file_is_not_the_fault_of_the_query(shop: Path) -> None:
    environment = Shop(database=str(shop))
    shop.write_bytes(b"no database " * 400)
    result = called(environment, ToolCall("run_sql", {"query": "SELECT * FROM item"}), LIMITS)
    assert result.error_kind == "raised"
    assert "file is not a database" in result.content


def test_same_rows_counts_rows_and_not_their_order(shop: Path) -> None:
    database = ReadOnlyDatabase(shop, SqlLimits(rows=3))
    first, second, fewer = (
        database.query(f"SELECT a FROM ({values})")
        for values in (
            "SELECT 1 AS a UNION ALL SELECT 2 UNION ALL SELECT 2",
            "SELECT 2.0 AS a UNION ALL SELECT 1 UNION ALL SELECT 2",
            "SELECT 1 AS a UNION ALL SELECT 2",
        )
    )
    assert first.same_rows(second)
    assert not first.same_rows(second, in_order=True)
    assert not first.same_rows(fewer)
    more = database.query("SELECT column1 FROM (VALUES (1), (2), (3), (4))")
    assert not more.same_rows(more), "rows that were left out may differ"


def test_queries_of_many_threads_get_their_own_rows(shop: Path) -> None:
    database = ReadOnlyDatabase(shop)
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: database.query(f"SELECT {n}").rows, range(64)))
    assert results == [((n,),) for n in range(64)]


def test_missing_and_foreign_files_are_refused_and_not_made(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("no database " * 100)
    for name in ("none.sqlite", "text.sqlite", "."):
        with pytest.raises(UserError, match="database must be an SQLite file that can be read"):
            ReadOnlyDatabase(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["text.sqlite"]
    with pytest.raises(ValueError, match="SqlLimits.rows must be > 0, got 0"):
        SqlLimits(rows=0)
