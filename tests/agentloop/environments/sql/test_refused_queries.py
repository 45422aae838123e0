"""What a query tries on the database and does not get, and where its limits end it."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from agentloop.environments.sql import QueryFailed, ReadOnlyDatabase, SqlLimits

FOREVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            """
            CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL);
            INSERT INTO item VALUES (1, 'pen', 2.5), (2, 'cup', 4.0), (3, 'hat', NULL);
            CREATE VIEW cheap AS SELECT name FROM item WHERE price < 3;
            """
        )
    return path


def reason(query: Callable[[], object]) -> str:
    with pytest.raises(QueryFailed) as caught:
        query()
    return str(caught.value)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("INSERT INTO item VALUES (4, 'bag', 1)", "anything but SELECT"),
        ("WITH x AS (SELECT 1) DELETE FROM item", "anything but SELECT"),
        ("DROP TABLE item", "anything but SELECT"),
        ("CREATE TABLE mine (a)", "anything but SELECT"),
        ("CREATE TEMP TABLE mine (a)", "anything but SELECT"),
        ("ATTACH '{folder}/other.sqlite' AS other", "anything but SELECT"),
        ("VACUUM INTO '{folder}/other.sqlite'", "anything but SELECT"),
        ("BEGIN IMMEDIATE", "anything but SELECT"),
        ("PRAGMA query_only = OFF", "PRAGMA query_only"),
        ("PRAGMA writable_schema = ON", "PRAGMA writable_schema"),
        ("PRAGMA temp_store_directory = '{folder}'", "PRAGMA temp_store_directory"),
        ("SELECT load_extension('{folder}/code.so')", "function load_extension"),
        ("SELECT printf('%.*c', 1000000000, 'a')", "function printf"),
    ],
)
def test_query_that_does_more_than_read_is_refused_by_name(shop: Path, query: str, named: str) -> None:
    before = hashlib.sha256(shop.read_bytes()).digest()
    problem = reason(lambda: ReadOnlyDatabase(shop).query(query.replace("{folder}", str(shop.parent))))
    assert problem == f"the database can only be read: {named} is refused"
    assert hashlib.sha256(shop.read_bytes()).digest() == before
    assert [path.name for path in shop.parent.iterdir()] == ["shop.sqlite"]


@pytest.mark.parametrize(
    "query",
    [
        f"{FOREVER} SELECT count(*) FROM c",
        f"{FOREVER} SELECT a.x FROM c a, c b WHERE a.x = -b.x",
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


@pytest.mark.parametrize(
    "query",
    [
        "SELECT zeroblob(1000000000)",
        "SELECT replace(hex(zeroblob(40000)), '0', 'abcdefgh')",
    ],
)
def test_huge_value_is_refused(shop: Path, query: str) -> None:
    assert reason(lambda: ReadOnlyDatabase(shop).query(query)) == "string or blob too big"


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("SELECT size FROM item", "no such column: size"),
        ("SELECT price OF item", 'near "item": syntax error'),
        ("", "the query must be a SELECT, got nothing that gives rows"),
        ("SELECT 1; DELETE FROM item", "You can only execute one statement at a time."),
        ("SELECT ?", "Incorrect number of bindings supplied. The current statement uses 1, and there are 0 supplied."),
        ("SELECT abs(-9223372036854775808)", "integer overflow"),
        ("SELECT '" + "a" * 4_000 + "'", "the query is longer than 4000 characters"),
    ],
)
def test_wrong_query_says_what_is_wrong(shop: Path, query: str, problem: str) -> None:
    assert reason(lambda: ReadOnlyDatabase(shop).query(query)) == problem


@pytest.mark.parametrize("query", ["SELECT 1\x00", "SELECT '\ud800'", "(" * 3000, "SELECT " + "-" * 3000 + "1"])
def test_no_text_raises_anything_else(shop: Path, query: str) -> None:
    try:
        ReadOnlyDatabase(shop).query(query)
    except QueryFailed as error:
        assert str(error)
