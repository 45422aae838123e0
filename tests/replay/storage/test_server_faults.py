"""A server that dies, and a way to it that breaks, under writers that go on."""

from __future__ import annotations

import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from replay import InvalidRecord, Limits, ReplayError, ReplayStore, make_sampler
from replay.errors import ConnectionLost
from tests.fakes.postgres_servers import LocalServer
from tests.fakes.records import RUN, group, iterate, new_store, policy, sql, task, trajectory
from tests.replay.storage.test_kill_points import STEPS
from tests.replay.storage.writers import Writer, begin, check_acknowledged, stored_ids, wait_for


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
def hurt_at(step: int | None, hurt: Callable[[], None]) -> Iterator[list[str]]:
    """Hurts once, at that step of what this process asks of servers meanwhile: the names of the steps passed."""
    passed: list[str] = []
    listening = []

    def pass_one(name: str) -> None:
        passed.append(name)
        if len(passed) - 1 == step:
            hurt()

    for target, event in STEPS:
        listening.append((target, event, lambda *_, name=event: pass_one(name)))
        sa.event.listen(*listening[-1])
    try:
        yield passed
    finally:
        for each in listening:
            sa.event.remove(*each)


class LosesReplies:
    """A way to the server that cuts the connection after COMMIT went in and before its answer came out.

    The first `losses` commits that arrive while it is armed are lost like that; everything else passes.
    """

    def __init__(self, server: Path, folder: Path) -> None:
        self._server = server
        self.folder = folder
        self.losses = 0
        self.lost = 0
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / server.name))
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.connect(str(self._server))
        silent = threading.Event()
        threading.Thread(target=self._answer, args=(server, client, silent), daemon=True).start()
        with suppress(OSError):
            while asked := client.recv(1 << 16):
                if b"COMMIT\x00" in asked and self.lost < self.losses:
                    self.lost += 1
                    silent.set()
                server.sendall(asked)
        _shut(client, server)

    def _answer(self, server: socket.socket, client: socket.socket, silent: threading.Event) -> None:
        with suppress(OSError):
            while answer := server.recv(1 << 16):
                if silent.is_set():
                    # The server has committed and answered; nobody will ever hear of it.
                    break
                client.sendall(answer)
        _shut(client, server)


def _shut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


NewDatabase = Callable[..., str]


def survive(server: LocalServer, hurt: Callable[[str], None], *, writers: int, times: int) -> None:
    """F5: nothing acknowledged is lost, nothing is there twice, and every writer goes on."""
    database = server.new_database()
    url = server.url(database)
    begin(url)
    running = [Writer.start(url, number, 1_000_000) for number in range(writers)]
    everyone = {f"{number:03d}" for number in range(writers)}
    wait_for(lambda: {id[:3] for id in stored_ids(url)} == everyone)
    for _ in range(times):
        time.sleep(0.4)
        hurt(database)
    before = set(stored_ids(url))
    wait_for(lambda: {id[:3] for id in set(stored_ids(url)) - before} == everyone, seconds=10)
    for writer in running:
        writer.stop()
    assert check_acknowledged(url, running, sent_again=True) > len(before)
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
            wait_for(lambda: kill_backend(own_server, database, chance))
            wait_for(lambda: server_answers(own_server))

    survive(own_server, hurt, writers=writers, times=times)


def learn(url: str, stops: Sequence[int | None], stop: Callable[[], None]) -> list[str]:
    """An iteration in peace, and one for each stop at a step of it; the names of the last one's steps."""
    sampler, limits = make_sampler("uniform", 3), Limits(max_uses=2, cooldown=1)
    with closing(new_store(url)) as store:
        store.resume(RUN, 0)
        for iteration, step in enumerate([None, *stops], start=1):
            with hurt_at(step, stop) as passed:
                iterate(store, iteration, sampler, count=6, limits=limits)
    return passed


def learned(url: str) -> list[list[tuple[Any, ...]]]:
    """All that a run has written, but for the time of day and how often it had to ask."""
    return [
        sql(url, f"select {columns} from {table} order by {columns}")
        for table, columns in (
            ("draws", "iteration, slot, trajectory, stream, state, probability, staleness, drift_mean"),
            ("iterations", "iteration, policy_version, fresh, replay, fraction, optimizer_steps"),
            ("metrics", "iteration, name, value"),
            ("sampler_state", "iteration, state"),
            ("policies", "version"),
            ("trajectories", "id, state, uses"),
            ("runs", "id, epoch"),
        )
    ]


Places = Callable[[list[str]], list[int]]
"""Steps at which an iteration is hurt, of all its steps by name; one for each iteration."""


def go_on(left: str, hurt: str, number: int, places: Places, fault: Callable[[], None]) -> None:
    """A run that is hurt in so many iterations goes on by itself, and is the run that was left in peace."""
    hurts = []

    def hurting() -> None:
        fault()
        hurts.append(True)

    learn(hurt, places(learn(left, [None] * number, hurting)), hurting)
    assert len(hurts) == number
    assert learned(hurt) == learned(left)


def ends(steps: list[str]) -> list[int]:
    """Of its five write transactions: append, reserve, draw, commit, publish."""
    found = [steps.index("checkin", at) for at, step in enumerate(steps) if step == "commit"]
    assert len(found) == 5
    return found


def test_run_goes_on_by_itself_when_its_server_is_stopped_between_draw_and_commit(own_server: LocalServer) -> None:
    def places(steps: list[str]) -> list[int]:
        reserved, drawn, committed = ends(steps)[1:4]
        # After the reservation, after the draw, and before the commit is there to stay.
        return [reserved, drawn, committed - 1]

    def stop() -> None:
        own_server.crash()
        own_server.start()

    left, hurt = (own_server.url(own_server.new_database()) for _ in range(2))
    go_on(left, hurt, 3, places, stop)


def test_reserve_draw_and_commit_that_were_not_answered_count_once(
    new_database: NewDatabase, unreliable: tuple[str, LosesReplies]
) -> None:
    hurt, way = unreliable
    lost = []

    def lose_two_replies() -> None:
        lost.append(way.lost)
        way.losses, way.lost = 2, 0

    # From the end of the transaction before it.
    go_on(new_database(), hurt, 3, lambda steps: ends(steps)[:3], lose_two_replies)
    assert [*lost, way.lost] == [0, 2, 2, 2]


def test_reader_has_its_answer_when_its_server_goes_after_it(postgres: LocalServer, new_database: NewDatabase) -> None:
    url = new_database()
    with closing(new_store(url)) as store:
        with store.reading() as connection:
            assert connection.exec_driver_sql("select id from runs").scalars().all() == [RUN]
            end_connections(postgres, url)
        with pytest.raises(ConnectionLost, match="What was stored is safe"), store.reading() as connection:
            end_connections(postgres, url)
            connection.exec_driver_sql("select id from runs")
        # What is wrong with a row is told, whether or not the server is still there to take it back.
        with hurt_at(5, lambda: end_connections(postgres, url)), pytest.raises(InvalidRecord, match="^group must be"):
            store.append([task()], [], [trajectory("a")])
        assert store.append([task()], [group()], [trajectory("a")]).inserted == 1


def test_server_that_stays_away_is_an_error_within_bounds(
    own_server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        assert store.append([task()], [group()], [trajectory("a")]).inserted == 1


@pytest.fixture
def unreliable(postgres: LocalServer, new_database: NewDatabase) -> Iterator[tuple[str, LosesReplies]]:
    """A database behind a way that loses replies; its URL through it."""
    url = sa.make_url(new_database())
    (socket,) = Path(str(url.query["host"])).glob(".s.PGSQL.*[0-9]")
    with tempfile.TemporaryDirectory(prefix="way-", dir="/tmp") as folder:
        way = LosesReplies(socket, Path(folder))
        yield url.update_query_dict({"host": folder}).render_as_string(), way
        way.close()


def test_work_is_tried_a_bounded_number_of_times(unreliable: tuple[str, LosesReplies]) -> None:
    url, way = unreliable
    with closing(new_store(url)):
        pass
    with closing(ReplayStore.open(url)) as store:
        way.losses = 100
        with pytest.raises(ConnectionLost, match="Whether the transaction was stored is not known"):
            store.add_policy(policy(1))
        assert way.lost == 8
