"""What is PostgreSQL's own: byte order, passwords, privileges, schemas; a server that dies, a way that breaks."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from replay import DatabaseRefused, Limits, ReplayError, ReplayStore, make_sampler, questions
from replay.errors import ConnectionLost, DatabaseFailed
from replay.storage.databases import open_database
from tests.fakes.postgres_servers import LocalServer
from tests.fakes.records import RUN, iterate, new_store, policy, put, sql, task, trajectory
from tests.fakes.replay_command import listed
from tests.replay.storage.collecting.episodes import claim, close, episode, issue
from tests.replay.storage.test_kill_points import contents
from tests.replay.storage.writers import Writer, begin, check_kept, stored_ids, wait_for

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
        put(store, *[trajectory(id) for id in ids])
        assert [row["id"] for row in listed(store)] == sorted(ids, reverse=True)


def test_who_reads_may_rest_as_long_as_he_likes_and_who_writes_may_not(new_database: NewDatabase) -> None:
    with closing(open_database(new_database(), read_only=False)) as database:
        for begun, most in ((database.reading, "0"), (database.writing, "5min"), (database.reading, "0")):
            with begun() as connection:
                asked = connection.exec_driver_sql("show idle_in_transaction_session_timeout")
                assert asked.scalar_one() == most


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


def test_buffer_may_stand_in_a_schema_of_its_own(new_database: NewDatabase) -> None:
    url = new_database(empty=True)
    sql(url, "create table notes (id integer)")
    own = f"{url}&options=-csearch_path%3Dmine"
    with pytest.raises(DatabaseRefused, match="must have a schema to stand in, got none of search_path mine"):
        ReplayStore.create(own)
    sql(url, "create schema mine")
    with closing(new_store(own)) as store:
        put(store, trajectory("a"))
    assert sql(url, "select id from mine.trajectories") == [("a",)]
    assert sql(url, "select tablename from pg_tables where schemaname = 'public'") == [("notes",)]


_WORKERS_RIGHTS = """create role {role};
grant select on all tables in schema public to {role};
grant insert on trajectories, segments, messages, groups, reclaimed, observations to {role};
grant update on tickets, groups, buffer_state to {role};
grant insert, update, delete on workers, engines to {role}"""


def test_worker_needs_no_right_to_write_draws_or_iterations(new_database: NewDatabase) -> None:
    url = new_database()
    role = "worker_" + url.rsplit("/", 1)[-1].partition("?")[0].rsplit("_", 1)[-1]
    with closing(new_store(url)) as learner:
        issue(learner, [0])
        sql(url, _WORKERS_RIGHTS.format(role=role))
        with closing(ReplayStore.open(f"{url}&options=-crole%3D{role}")) as worker:
            held = claim(worker, "w", count=2)
            worker.roles.report("worker", RUN, "w", {})
            assert worker.tickets.extend(held, lease_s=60) == {}
            assert worker.tickets.finish([(held[0], episode(held[0]))]) == [True]
            assert worker.tickets.fail([held[1]], "overtime") == {}
            for write in (lambda: close(worker, 0), lambda: worker.resume(RUN, 0)):
                with pytest.raises(DatabaseFailed, match="permission denied"):
                    write()
        close(learner, 0)
        with closing(ReplayStore.open(f"{url}&options=-crole%3D{role}", read_only=True)) as reader:
            assert questions.summary(reader)["trajectories"] == 1
        sql(url, f"drop owned by {role}; drop role {role}")


def kill_backend(server: LocalServer, database: str, chance: random.Random) -> bool:
    """kill -9 of one process that serves `database`: the server then restarts them all. False: there was none."""
    with suppress(psycopg.OperationalError, ProcessLookupError, IndexError):
        os.kill(chance.choice(server.backends(database)), signal.SIGKILL)
        return True
    return False


def end_connections(server: LocalServer, url: str) -> None:
    """As a server that is stopped ends them."""
    database = sa.make_url(url).database
    server.ask(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{database}'")


@contextmanager
def failing_commits(every: int, fail: Callable[[Any], None]) -> Iterator[list[int]]:
    """Each so-many-th commit of this process fails; counted in the list: commits, and those that failed."""
    counts = [0, 0]

    def look(connection: sa.Connection) -> None:
        counts[0] += 1
        if counts[0] % every == 0:
            counts[1] += 1
            fail(connection.connection.driver_connection)

    sa.event.listen(sa.Engine, "commit", look)
    try:
        yield counts
    finally:
        sa.event.remove(sa.Engine, "commit", look)


def lose_reply(connection: Any) -> None:
    """The server commits, and nobody ever hears of it."""
    connection.commit()
    connection.close()


def survive(server: LocalServer, hurt: Callable[[str], None], *, writers: int, times: int) -> None:
    """F5: nothing acknowledged is lost, nothing is there twice, and every writer goes on."""
    database = server.new_database()
    url = server.url(database)
    begin(url)
    running = [Writer(url, number, 1_000_000) for number in range(writers)]
    everyone = {f"{number:03d}" for number in range(writers)}
    wait_for(lambda: {id[:3] for id in stored_ids(url)} == everyone)
    for _ in range(times):
        time.sleep(0.4)
        hurt(database)
    before = set(stored_ids(url))
    wait_for(lambda: {id[:3] for id in set(stored_ids(url)) - before} == everyone, seconds=10)
    for writer in running:
        writer.stop()
    assert check_kept(url, running, sent_again=True) > len(before)
    assert [writer.process.exitcode for writer in running] == [0] * writers


def server_answers(server: LocalServer) -> bool:
    try:
        return server.ask("select 1") == [(1,)]
    except psycopg.OperationalError:
        return False


_TWENTY_TIMES = pytest.param(8, 20, marks=[pytest.mark.soak, pytest.mark.every_server])


@pytest.mark.parametrize("fault", ["crash", "kill of a backend"])
@pytest.mark.parametrize(("writers", "times"), [(4, 2), _TWENTY_TIMES])
def test_writers_outlive_faults_of_their_server(own_server: LocalServer, writers: int, times: int, fault: str) -> None:
    chance = random.Random(1)

    def hurt(database: str) -> None:
        if fault == "crash":
            own_server.crash()
            own_server.start()
        else:
            log = own_server.folder / "log"
            before = log.stat().st_size
            wait_for(lambda: kill_backend(own_server, database, chance))
            # It may answer for a moment longer, until it has seen what happened.
            wait_for(lambda: b"reinitializing" in log.read_bytes()[before:])
            wait_for(lambda: server_answers(own_server))

    survive(own_server, hurt, writers=writers, times=times)


def learn(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Three iterations; all that they leave but for the numbers that count how often something was asked."""
    sampler, limits = make_sampler("uniform", 3), Limits(successful_only=False, max_uses=2)
    with closing(ReplayStore.open(url)) as store:
        store.resume(RUN, 0)
        for iteration in (1, 2, 3):
            iterate(store, iteration, sampler, count=6, limits=limits)
    found = contents(url, but=frozenset({"changed", "sequence"}))
    del found["buffer_state"]
    return found


@pytest.mark.parametrize(("fault", "every", "failed"), [("the server crashes before", 7, 2), ("no reply", 3, 7)])
def test_run_whose_commits_fail_goes_on_by_itself_and_is_the_run_that_was_left_in_peace(
    own_server: LocalServer, fault: str, every: int, failed: int
) -> None:
    """Append, reserve, draw, commit and publish each fail, and again when they are tried once more."""

    def crash(connection: Any) -> None:
        own_server.crash()
        own_server.start()

    left, hurt = (own_server.url(own_server.new_database()) for _ in range(2))
    for url in (left, hurt):
        new_store(url).close()
    whole = learn(left)
    with failing_commits(every, lose_reply if fault == "no reply" else crash) as counts:
        assert learn(hurt) == whole
    assert counts[1] >= failed


def test_work_is_tried_a_bounded_number_of_times(new_database: NewDatabase) -> None:
    with closing(new_store(new_database())) as store, failing_commits(1, lose_reply) as counts:
        with pytest.raises(ConnectionLost, match="Whether the transaction was stored is not known"):
            store.add_policy(policy(1))
        assert counts == [8, 8]


def test_reader_has_its_answer_when_its_server_goes_after_it(postgres: LocalServer, new_database: NewDatabase) -> None:
    url = new_database()
    with closing(new_store(url)) as store:
        with store.reading() as connection:
            assert connection.exec_driver_sql("select id from runs").scalars().all() == [RUN]
            end_connections(postgres, url)
        with pytest.raises(ConnectionLost, match="What was stored is safe"), store.reading() as connection:
            end_connections(postgres, url)
            connection.exec_driver_sql("select id from runs")
        assert put(store, trajectory("a")).inserted == 1


def test_server_that_stays_away_is_an_error_in_time(own_server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.storage.databases.postgres._WAITS", (0.01, 0.02, 0.03))
    url = own_server.url(own_server.new_database())
    with closing(new_store(url)) as store:
        own_server.crash()
        for attempt in (lambda: store.append([task()], [], []), lambda: store.read(["a"]), store.run):
            with pytest.raises(ReplayError, match="must be intact and accessible, got .* Nothing was begun") as error:
                attempt()
            assert not isinstance(error.value, ConnectionLost)
            assert "\n" not in str(error.value)
        own_server.start()
        assert put(store, trajectory("a")).inserted == 1
