"""Agents' sessions under way: a sampled reply is stored before the agent gets it. When a session ends it becomes a
trajectory, and is deleted here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from context.messages import Message
from context.tokens.session_nodes import Node, Status, checked_nodes
from replay.errors import ReplayError, SessionForgotten, shortened
from replay.records import StopReason
from replay.storage.databases import Database
from replay.storage.format.encoding import BlobError
from replay.storage.format.rows import (
    NODE_COLUMNS,
    conversation_row,
    messages_of,
    node_checksum,
    node_rows,
    node_values,
    nodes_of,
    status_checksum,
)
from replay.storage.format.schema import reclaimed, session_nodes, sessions, trajectories
from replay.storage.statements import insert, remove, rows_by_key

_SAID = ("said", "checksum")
_nodes = session_nodes.c
_COLUMNS = tuple(_nodes[column.name] for column in NODE_COLUMNS)
_DELIVERED = {
    "status": Status.TRAINED,
    "node_checksum": _nodes.node_checksum + status_checksum(Status.TRAINED) - status_checksum(Status.UNDELIVERED),
}


@dataclass(frozen=True)
class OpenSession:
    id: str
    run: str
    opened_at: str
    """The time that its chat templates take for now, in ISO format."""


class Sessions:
    """The part of the store for sessions under way. Every method is one transaction, and may be repeated."""

    def __init__(self, database: Database, write: Callable[[Callable[[sa.Connection], Any]], Any]) -> None:
        """`write` does work in one transaction. It raises RunReplaced if another process resumed the run, for that one
        numbers nodes in the same way."""
        self._database, self._write = database, write

    def open(self, session: OpenSession) -> OpenSession | None:
        """Return the session with this id, as it was first opened. None: it has ended, and is a trajectory."""

        def work(connection: sa.Connection) -> OpenSession | None:
            found = _session(connection, session.id)
            ended = [sa.select(table.c.id).where(table.c.id == session.id) for table in (trajectories, reclaimed)]
            if found is None and connection.execute(sa.union_all(*ended)).first() is not None:
                return None
            if found is None:
                connection.execute(sessions.insert().values(vars(session)))
            return found or session

        found: OpenSession | None = self._write(work)
        return found

    def opened(self, run: str) -> list[OpenSession]:
        """The sessions of a run that have not ended."""
        query = sa.select(*sessions.c).where(sessions.c.run == run).order_by(sessions.c.opened_at, sessions.c.id)
        return self._database.read(lambda connection: [OpenSession(*row) for row in connection.execute(query)])

    def add(self, given: Sequence[tuple[str, Node]], delivered: Sequence[tuple[str, int]] = ()) -> None:
        """Store nodes, each with the id of its session, and mark `delivered` replies, by session and number.

        Replies that end at the same time may each bring the same waiting nodes. Raises SessionForgotten if a session is
        not stored.
        """
        rows = []
        for id, node in {(id, node.number): (id, node) for id, node in given}.values():
            (row,) = node_rows(id, [node])
            said, _ = conversation_row(id, node.messages, compressed=self._database.compresses_text)
            checksum = node_checksum(row.pop("trajectory"), node_values(row), said["checksum"])
            rows.append(row | {"session": id, "node_checksum": checksum} | {name: said[name] for name in _SAID})

        def work(connection: sa.Connection) -> None:
            for id, node in given:
                # A transaction that is repeated now may have stored it.
                connection.execute(session_nodes.delete().where(_is_node(id, node.number)))
            try:
                insert(connection, session_nodes, rows)
            except exc.IntegrityError as error:
                raise SessionForgotten("session must be one that is under way, got one that is not stored.") from error
            for id, number in delivered:
                reply = _is_node(id, number) & (_nodes.status == Status.UNDELIVERED)
                connection.execute(session_nodes.update().where(reply).values(_DELIVERED))

        self._write(work)

    def nodes(self, id: str) -> list[Node]:
        """The stored nodes of a session. Raises ReplayError for a session that is not open, or is damaged."""
        return self._database.read(lambda connection: session_nodes_of(connection, id))

    def place_of_next_row(self, run: str, task: str) -> tuple[int, float | None]:
        """The next free slot of a run's rows, and the mean reward of its answered attempts at a task (None: it has
        none)."""
        rows = trajectories.c
        last = sa.select(sa.func.max(rows.slot)).where(rows.run == run, rows.iteration == 0)
        answered = (rows.task == task) & (rows.stop_reason == StopReason.ANSWERED)
        mean = sa.select(sa.func.avg(rows.reward)).where(rows.run == run, answered)
        slot, reward = self._database.read(lambda connection: (connection.scalar(last), connection.scalar(mean)))
        return 0 if slot is None else slot + 1, reward

    def end(self, ids: Sequence[str]) -> None:
        """Delete sessions."""
        self._write(lambda connection: end(connection, ids))


def session_nodes_of(connection: sa.Connection, id: str) -> list[Node]:
    """The stored nodes of a session: see `Sessions.nodes`."""
    if _session(connection, id) is None:
        raise ReplayError(f"session must be one that is under way, got {id!r}.")
    columns = (*_COLUMNS, *(_nodes[name] for name in _SAID), _nodes.node_checksum)
    stored = list(rows_by_key(connection, columns, [id], key=_nodes.session, order_by=(_nodes.number,)))
    place = NODE_COLUMNS.index(next(column for column in NODE_COLUMNS if column.key == "num_messages"))
    try:
        said: list[Message] = []
        for *node, text, checksum, of_node in stored:
            if node_checksum(id, node, checksum) != of_node:
                raise BlobError("a request of another checksum")
            said += messages_of(node[place], text, checksum)
        return list(checked_nodes(nodes_of([row[: len(_COLUMNS)] for row in stored], said)))
    except (TypeError, ValueError) as error:
        raise ReplayError(f"session {id} must read back as it was written, got {shortened(str(error))}") from error


def end(connection: sa.Connection, ids: Sequence[str]) -> int:
    """Delete sessions, and return their number."""
    return remove(connection, sessions, sessions.c.id.in_(ids))


def _is_node(session: str, number: int) -> sa.ColumnElement[bool]:
    return (_nodes.session == session) & (_nodes.number == number)


def _session(connection: sa.Connection, id: str) -> OpenSession | None:
    row = connection.execute(sa.select(*sessions.c).where(sessions.c.id == id)).one_or_none()
    return None if row is None else OpenSession(*row)
