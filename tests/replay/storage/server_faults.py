"""What happens to servers and to the way to them: a backend is killed, a reply never comes."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import sqlalchemy as sa

from tests.fakes.postgres_servers import LocalServer
from tests.replay.storage.kill_points import STEPS


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
