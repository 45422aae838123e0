"""A server that dies, and a way to it that breaks, under writers that go on."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from replay import ReplayError
from replay.databases import open_database
from replay.errors import ConnectionLost
from tests.replay.fakes import RUN, Born, group, iteration_record, new_store, policy, sql, task, trajectory
from tests.replay.postgres_servers import LocalServer, Postgres
from tests.replay.server_faults import LosesReplies, kill_backend
from tests.replay.writers import Writer, begin, check_acknowledged, stored_ids, wait_for

NewDatabase = Callable[..., str]


def survive(server: LocalServer, hurt: Callable[[str], None], *, writers: int, times: int, pause: float) -> None:
    """F5: nothing acknowledged is lost, nothing is there twice, and every writer goes on."""
    database = server.new_database()
    url = server.url(database)
    begin(url)
    running = [Writer.start(url, number, 1_000_000) for number in range(writers)]
    for _ in range(times):
        time.sleep(pause)
        hurt(database)
    before = set(stored_ids(url))
    everyone = {f"{number:03d}" for number in range(writers)}
    wait_for(lambda: {id[:3] for id in set(stored_ids(url)) - before} == everyone, seconds=10)
    for writer in running:
        writer.stop()
    assert check_acknowledged(url, running, sent_again=True) > len(before)
    assert [writer.process.exitcode for writer in running] == [0] * writers


def survive_crashes(server: LocalServer, *, writers: int, times: int, pause: float) -> None:
    def crash(database: str) -> None:
        server.crash()
        server.start()

    survive(server, crash, writers=writers, times=times, pause=pause)


def survive_kills(server: LocalServer, *, writers: int, times: int, pause: float) -> None:
    chance = random.Random(1)

    def kill(database: str) -> None:
        wait_for(lambda: kill_backend(server, database, chance))
        wait_for(lambda: server_answers(server))

    survive(server, kill, writers=writers, times=times, pause=pause)


def server_answers(server: LocalServer) -> bool:
    try:
        return server.ask("select 1") == [(1,)]
    except psycopg.OperationalError:
        return False


def test_writers_outlive_crashes_of_their_server(own_server: LocalServer) -> None:
    survive_crashes(own_server, writers=8, times=2, pause=0.4)


def test_writers_outlive_kills_of_backends(own_server: LocalServer) -> None:
    survive_kills(own_server, writers=4, times=2, pause=0.4)


@pytest.mark.soak
@pytest.mark.every_server
def test_writers_outlive_twenty_crashes_in_a_minute(own_server: LocalServer) -> None:
    survive_crashes(own_server, writers=8, times=20, pause=2.5)


@pytest.mark.soak
@pytest.mark.every_server
def test_writers_outlive_twenty_kills_of_backends(own_server: LocalServer) -> None:
    survive_kills(own_server, writers=8, times=20, pause=1.0)


def test_store_goes_on_after_its_server_was_restarted(own_server: LocalServer) -> None:
    """Also what is not idempotent: no transaction had begun."""
    url = own_server.url(own_server.new_database())
    with closing(new_store(url)) as store:
        born = Born(1).append_to(store)
        began = time.monotonic()
        own_server.crash()
        own_server.start()
        store.reserve_fresh([])
        assert [row.id for row in store.read([born.trajectories[0].id])] == [born.trajectories[0].id]
        assert store.run().id == RUN
        assert time.monotonic() - began < 10


def test_server_that_stays_away_is_an_error_within_bounds(
    own_server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.databases.postgres._WAITS", (0.01, 0.02, 0.03))
    url = own_server.url(own_server.new_database())
    with closing(new_store(url)) as store:
        own_server.crash()
        for attempt in (lambda: store.append([task()], [], []), lambda: store.read(["a"]), store.run):
            with pytest.raises(ReplayError, match="must be intact and accessible, got .* Nothing was begun") as error:
                attempt()
            assert not isinstance(error.value, ConnectionLost)
            assert "\n" not in str(error.value)
        own_server.start()
        assert store.append([task()], [group()], [trajectory("a")]).inserted == 1


@pytest.fixture
def unreliable(postgres: Postgres, new_database: NewDatabase) -> Iterator[tuple[str, LosesReplies]]:
    """A database behind a way that loses replies; its URL through it."""
    url = sa.make_url(new_database())
    (socket,) = Path(str(url.query["host"])).glob(".s.PGSQL.*[0-9]")
    with tempfile.TemporaryDirectory(prefix="way-", dir="/tmp") as folder:
        way = LosesReplies(socket, Path(folder))
        yield url.update_query_dict({"host": folder}).render_as_string(), way
        way.close()


@pytest.mark.every_server
def test_append_whose_commit_was_not_answered_is_stored_once(unreliable: tuple[str, LosesReplies]) -> None:
    url, way = unreliable
    with closing(new_store(url)) as store:
        for losses in (1, 3):
            way.losses, way.lost = losses, 0
            store.append([task()], [group()], [trajectory(f"a{losses}"), trajectory(f"b{losses}")])
            # The first one counted; those after it found its rows and changed nothing but the counter.
            assert way.lost == losses
        assert stored_ids(url) == ["a1", "a3", "b1", "b3"]
        assert [row.id for row in store.read(["a1", "b3"])] == ["a1", "b3"]
    assert sql(url, "select count(*), count(distinct trajectory) from segments") == [(4, 4)]


def test_idempotent_writes_are_done_again(unreliable: tuple[str, LosesReplies]) -> None:
    url, way = unreliable
    with closing(new_store(url)) as store:
        way.losses, way.lost = 1, 0
        store.add_policy(policy(1))
        way.losses, way.lost = 1, 0
        store.add_metrics(RUN, 1, {"loss": 0.5})
        assert way.lost == 1
    assert sql(url, "select version from policies order by 1") == [(0,), (1,)]
    assert sql(url, "select value from metrics") == [(0.5,)]


def test_other_writes_say_that_their_outcome_is_not_known(unreliable: tuple[str, LosesReplies]) -> None:
    url, way = unreliable
    with closing(new_store(url)) as store:
        way.losses = 1
        with pytest.raises(ConnectionLost, match="Whether the transaction was stored is not known") as error:
            store.commit(iteration_record(1, replay=0), [], sampler_state={})
        assert "\n" not in str(error.value)
        # It was; resuming from before it takes it back.
        assert sql(url, "select iteration from iterations") == [(1,)]
        store.resume(RUN, 0)
        store.commit(iteration_record(1, replay=0), [], sampler_state={})


def test_work_is_tried_a_bounded_number_of_times(unreliable: tuple[str, LosesReplies]) -> None:
    url, way = unreliable
    with closing(new_store(url)):
        pass
    with closing(open_database(url, read_only=False)) as database:
        way.losses = 100
        tries = []
        with pytest.raises(ConnectionLost):
            database.write(lambda connection: tries.append(connection), idempotent=True)
        assert len(tries) == 8 == way.lost
