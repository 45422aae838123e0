"""Labels and notes on trajectories and runs. Training never depends on them."""

import getpass
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import sqlalchemy as sa

from replay.errors import ReplayError
from replay.records import Label
from replay.storage.format.rows import chunked, now
from replay.storage.format.schema import run_labels, runs, trajectories, trajectory_labels
from replay.storage.statements import insert, rows_by_key, selected
from replay.storage.validate import checked

Labelled = Literal["trajectory", "run"]
"""The kind of row that a label is on."""
_TABLES = {"trajectory": (trajectory_labels, trajectories.c.id), "run": (run_labels, runs.c.id)}


def this_user() -> str:
    """The name of this process's user, who makes a label unless another name is given."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown"


class Labels:
    """The part of the store for labels. Every method is one transaction, and may be repeated."""

    def __init__(self, write: Callable[[Callable[[sa.Connection], int]], int]) -> None:
        self._write = write

    def add(
        self,
        ids: Sequence[str],
        label: str,
        note: str | None = None,
        *,
        by: str | None = None,
        on: Labelled = "trajectory",
    ) -> int:
        """Label stored trajectories or runs, and return their number. The same label with another note is replaced.

        `by` is who makes the label; None: the user of this process. Raises InvalidRecord for an invalid label, and
        ReplayError for an id that is not stored.
        """
        (values,) = checked([Label(label, note, by or this_user(), now())], "label", "label")
        wanted = list(dict.fromkeys(ids))

        def work(connection: sa.Connection) -> int:
            stored = _stored(connection, wanted, on)
            if missing := [id for id in wanted if id not in stored]:
                raise ReplayError(f"id must be that of a stored {on}, got {missing[0]!r}. See: agentloop replay ls")
            _remove(connection, wanted, label, on)
            insert(connection, _TABLES[on][0], [{on: id, **values} for id in wanted])
            return len(wanted)

        return self._write(work)

    def remove(self, ids: Sequence[str], label: str, *, on: Labelled = "trajectory") -> int:
        """Remove a label with its notes, and return the number of rows that had it."""
        return self._write(lambda connection: _remove(connection, ids, label, on))

    def add_missing(self, given: Mapping[str, Sequence[Label]], *, on: Labelled = "trajectory") -> int:
        """Add checked labels of an import, by id, to stored rows that lack them, and return the number added."""

        def work(connection: sa.Connection) -> int:
            known = labels_of(connection, [*given], on)
            there = {(id, label.label) for id, found in known.items() for label in found}
            wanted = {(id, label.label): label for id in _stored(connection, [*given], on) for label in given[id]}
            rows = [{on: id, **vars(label)} for (id, _), label in wanted.items() if (id, label.label) not in there]
            insert(connection, _TABLES[on][0], rows)
            return len(rows)

        return self._write(work)


def labels_of(connection: sa.Connection, ids: Sequence[str], on: Labelled = "trajectory") -> dict[str, list[Label]]:
    """The labels of rows by id, each row's in the order of their names. An id without labels is left out."""
    table, _ = _TABLES[on]
    found: dict[str, list[Label]] = {}
    for id, *values in sorted(rows_by_key(connection, tuple(table.c), ids, key=table.c[on])):
        found.setdefault(id, []).append(Label(*values))
    return found


def _stored(connection: sa.Connection, ids: Sequence[str], on: Labelled) -> set[str]:
    _, id = _TABLES[on]
    return {row[0] for row in selected(connection, [id], id, ids)}


def _remove(connection: sa.Connection, ids: Sequence[str], label: str, on: Labelled) -> int:
    table, _ = _TABLES[on]
    return sum(
        connection.execute(table.delete().where(table.c[on].in_(chunk), table.c.label == label)).rowcount
        for chunk in chunked(ids)
    )
