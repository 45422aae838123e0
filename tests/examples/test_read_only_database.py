"""A database that can only be read gives rows, ends queries at their limits, and refuses all else that they try."""

import hashlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentloop.environments import Task
from agentloop.environments.tools.results import ToolResult
from agentloop.errors import UserError
from context.messages import Message
from examples.sql_agent.read_only_database import QueryFailed, ReadOnlyDatabase, SqlLimits, SqlQueries
from tests.fakes.environments.faulty_tools import ask

FOREVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
TABLES = """
CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL);
INSERT INTO item VALUES (1, 'pen', 2.5), (2, 'cup', 4.0), (3, 'hat', NULL);
CREATE TABLE sale (item INTEGER REFERENCES item, day TEXT);
INSERT INTO sale VALUES (1, 'mon'), (1, 'tue'), (2, 'mon');
CREATE VIEW cheap AS SELECT name FROM item WHERE price < 3;
"""


class Shop(SqlQueries):
    def task_from_row(self, row: Any) -> Task:
        return Task(f"{self.database.schema()}\n{row['question']}")

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return 0.0


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "the shop?.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(TABLES)
    return path


def reason(query: Callable[[], object]) -> str:
    with pytest.raises(QueryFailed) as caught:
        query()
    return str(caught.value)


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
    assert environment.database.schema().splitlines() == [line for line in TABLES.splitlines() if "CREATE" in line]
    for query, shown in answers.items():
        assert ask(environment, "run_sql", query=query) == ToolResult(shown), query
    # Trouble with the file is not the fault of the query.
    shop.write_bytes(b"no database " * 400)
    result = ask(environment, "run_sql", query="SELECT * FROM item")
    assert result.error_kind == "raised" and "file is not a database" in result.content


def test_same_rows_counts_rows_and_not_their_order(shop: Path) -> None:
    database = ReadOnlyDatabase(shop, SqlLimits(rows=3))
    first, second, fewer, more = (
        database.query(f"SELECT column1 FROM (VALUES {values})")
        for values in ("(1), (2), (2)", "(2.0), (1), (2)", "(1), (2)", "(1), (2), (3), (4)")
    )
    assert first.same_rows(second)
    assert not first.same_rows(second, in_order=True)
    assert not first.same_rows(fewer)
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
    with pytest.raises(ValueError, match=r"SqlLimits\nrows\n.*greater than 0 .*input_value=0"):
        SqlLimits(rows=0)


def only_read(refused: str) -> str:
    return f"the database can only be read: {refused} is refused"


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("INSERT INTO item VALUES (4, 'bag', 1)", only_read("anything but SELECT")),
        ("WITH x AS (SELECT 1) DELETE FROM item", only_read("anything but SELECT")),
        ("CREATE TEMP TABLE mine (a)", only_read("anything but SELECT")),
        ("ATTACH '{folder}/other.sqlite' AS other", only_read("anything but SELECT")),
        ("VACUUM INTO '{folder}/other.sqlite'", only_read("anything but SELECT")),
        ("BEGIN IMMEDIATE", only_read("anything but SELECT")),
        ("PRAGMA query_only = OFF", only_read("PRAGMA query_only")),
        ("PRAGMA temp_store_directory = '{folder}'", only_read("PRAGMA temp_store_directory")),
        ("SELECT load_extension('{folder}/code.so')", only_read("function load_extension")),
        ("SELECT printf('%.*c', 1000000000, 'a')", only_read("function printf")),
        ("SELECT zeroblob(1000000000)", "string or blob too big"),
        ("SELECT replace(hex(zeroblob(40000)), '0', 'abcdefgh')", "string or blob too big"),
        ("SELECT size FROM item", "no such column: size"),
        ("", "the query must be a SELECT, got nothing that gives rows"),
        ("SELECT 1; DELETE FROM item", "You can only execute one statement at a time."),
        ("SELECT ?", "Incorrect number of bindings supplied. The current statement uses 1, and there are 0 supplied."),
        ("SELECT abs(-9223372036854775808)", "integer overflow"),
        ("SELECT '" + "a" * 4_000 + "'", "the query is longer than 4000 characters"),
    ],
)
def test_query_that_is_wrong_or_writes_is_refused_and_changes_nothing(shop: Path, query: str, problem: str) -> None:
    before = hashlib.sha256(shop.read_bytes()).digest()
    assert reason(lambda: ReadOnlyDatabase(shop).query(query.replace("{folder}", str(shop.parent)))) == problem
    assert hashlib.sha256(shop.read_bytes()).digest() == before
    assert list(shop.parent.iterdir()) == [shop]


@pytest.mark.parametrize("query", ["SELECT 1\x00", "SELECT '\ud800'", "(" * 3000, "SELECT " + "-" * 3000 + "1"])
def test_no_text_raises_anything_else(shop: Path, query: str) -> None:
    assert reason(lambda: ReadOnlyDatabase(shop).query(query))


@pytest.mark.parametrize(
    "query",
    [
        f"{FOREVER} SELECT count(*) FROM c",
        "WITH n(x) AS (VALUES (1), (2), (3), (4), (5), (6), (7), (8)) "
        "SELECT count(*) FROM n a, n b, n c, n d, n e, n f, n g, n h, n i, n j, n k, n l",
    ],
)
def test_query_without_an_end_is_ended_where_it_runs(shop: Path, query: str) -> None:
    database = ReadOnlyDatabase(shop, SqlLimits(seconds=0.2))
    began = time.process_time()
    assert reason(lambda: database.query(query)) == "stopped: it took longer than 0.2 s"
    assert time.process_time() - began < 2, "ten times what it was allowed"
    assert database.query("SELECT count(*) FROM item").rows == ((3,),)


def test_tables_that_multiply_while_they_are_prepared_are_refused(shop: Path) -> None:
    """SQLite copies a WITH table wherever it is named: a billion copies here, before the first step."""
    chain = ", ".join(f"c{i} AS (SELECT 1 FROM c{i - 1}, c{i - 1})" for i in range(1, 31))
    problem = reason(lambda: ReadOnlyDatabase(shop).query(f"WITH c0 AS (SELECT 1), {chain} SELECT 1 FROM c30"))
    assert problem == "stopped: WITH tables that name each other often take too much to prepare"


def test_flood_of_rows_is_cut_and_says_so(shop: Path) -> None:
    result = ReadOnlyDatabase(shop, SqlLimits(rows=3)).query(f"{FOREVER} SELECT x FROM c")
    assert (result.rows, result.complete) == (((1,), (2,), (3,)), False)
    assert result.observation() == "x\n1\n2\n3\n[cut: more than 3 rows]"
    result = ReadOnlyDatabase(shop, SqlLimits(characters=10)).query("SELECT 'abcdefghijk' AS a")
    assert result.observation() == "a\nabcdefgh...\n[cut: more than 10 characters]"
