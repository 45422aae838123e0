"""What is PostgreSQL's own: byte order, passwords, privileges, schemas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import sqlalchemy as sa

from replay import DatabaseRefused, ReplayError, ReplayStore, questions
from tests.fakes.postgres_servers import LocalServer
from tests.fakes.records import FreshRows, group, new_store, sql, task, trajectory
from tests.fakes.replay_command import listed

NewDatabase = Callable[..., str]


def test_database_of_another_encoding_is_refused(new_database: NewDatabase) -> None:
    url = new_database(empty=True, options="template template0 encoding 'SQL_ASCII'")
    with pytest.raises(DatabaseRefused, match="must have encoding UTF8, got SQL_ASCII"):
        ReplayStore.create(url)


@pytest.mark.every_server
def test_order_does_not_depend_on_the_collation_of_the_server(postgres: LocalServer, new_database: NewDatabase) -> None:
    has_icu = postgres.ask("select 1 from pg_collation where collname = 'en-US-x-icu'")
    options = "template template0 locale_provider icu icu_locale 'en-US'" if has_icu else "template template0"
    url = new_database(empty=True, options=options)
    ids = ["B", "a", "b", "A", "ä", "Z", "_", "a b", "ab"]
    with closing(new_store(url)) as store:
        store.append([task()], [group()], [trajectory(id) for id in ids])
        assert [row["id"] for row in listed(store)] == sorted(ids, reverse=True)


def test_password_is_in_no_text(new_database: NewDatabase) -> None:
    url = sa.make_url(new_database())
    secret = [url.set(password="hunter2"), url.update_query_dict({"password": "hunter2"})]
    for given in (one.render_as_string(hide_password=False) for one in secret):
        with closing(new_store(given)) as store:
            assert "hunter2" not in store.url + repr(questions.summary(store))
            with pytest.raises(ReplayError) as unknown:
                store.run("another")
            assert "hunter2" not in str(unknown.value)
        for wrong in (given.replace(str(url.database), "nowhere"), given.replace("+psycopg", "+asyncpg")):
            with pytest.raises(DatabaseRefused) as refused:
                ReplayStore.open(wrong)
            assert "hunter2" not in str(refused.value)


def test_reader_without_the_right_to_write_may_look(postgres: LocalServer, new_database: NewDatabase) -> None:
    url = new_database()
    with closing(new_store(url)) as store:
        FreshRows(1).append_to(store)
    sql(url, "create role looks login")
    try:
        sql(url, "grant select on all tables in schema public to looks")
        looks = sa.make_url(url).set(username="looks").render_as_string()
        with closing(ReplayStore.open(looks, read_only=True)) as reader:
            assert questions.summary(reader)["trajectories"] == 4
        with closing(ReplayStore.open(looks)) as writer, pytest.raises(ReplayError, match="got 'permission denied for"):
            writer.append([task()], [], [])
    finally:
        sql(url, "drop owned by looks")
        sql(url, "drop role looks")


def test_buffer_may_stand_in_a_schema_of_its_own(new_database: NewDatabase) -> None:
    url = new_database(empty=True)
    sql(url, "create table notes (id integer)")
    own = f"{url}&options=-csearch_path%3Dmine"
    with pytest.raises(DatabaseRefused, match="must have a schema to stand in, got none of search_path mine"):
        ReplayStore.create(own)
    sql(url, "create schema mine")
    with closing(new_store(own)) as store:
        store.append([task()], [group()], [trajectory("a")])
    assert sql(url, "select id from mine.trajectories") == [("a",)]
    assert sql(url, "select tablename from pg_tables where schemaname = 'public'") == [("notes",)]
