"""Counters of the database, which order events without a clock. Write transactions run one after another, so a number
that can be read has no smaller one still in flight. A run's epoch says which process may write it: a process that
resumes the run takes it over, and the process before can write nothing more."""

from collections.abc import Sequence
from typing import Literal

import sqlalchemy as sa

from replay.errors import DamagedDatabase, ReplayError, RunReplaced
from replay.records import RESERVED
from replay.storage.format.rows import chunked
from replay.storage.format.schema import buffer_state, draws, runs, trajectories

Counter = Literal["changed", "draws"]


def next_number(connection: sa.Connection, counter: Counter) -> int:
    """Raise a counter by one and return it. Write transactions run one after another, so nobody else raises it."""
    number = last_number(connection, counter) + 1
    connection.execute(buffer_state.update().where(buffer_state.c.name == counter).values(value=number))
    return number


def last_number(connection: sa.Connection, counter: Counter) -> int:
    """The value of a counter. Raises DamagedDatabase if the value is missing or no valid number."""
    value = connection.scalar(sa.select(buffer_state.c.value).where(buffer_state.c.name == counter))
    if type(value) is not int or not 0 <= value <= 2**62:
        raise DamagedDatabase(f"{value!r} in buffer_state.value of {counter!r}")
    return value


def set_state(connection: sa.Connection, ids: Sequence[str], state: str, reason: str | None = None) -> None:
    """Set the state of rows, so that every reader's next refresh sees it."""
    if not ids:
        return
    values = {"state": state, "state_reason": reason, "changed": next_number(connection, "changed")}
    for chunk in chunked(ids):
        connection.execute(trajectories.update().where(trajectories.c.id.in_(chunk)).values(values))


def take_over(connection: sa.Connection, run: str) -> int:
    """Begin the run's next epoch and return it. Processes of earlier epochs can no longer write the run, which has not
    ended any more."""
    begun = runs.update().where(runs.c.id == run).values(epoch=runs.c.epoch + 1, ended=False)
    epoch = connection.scalar(begun.returning(runs.c.epoch))
    if epoch is None:
        raise ReplayError(f"run must be a stored one, got {run!r}. Add it first.")
    return int(epoch)


def refuse_replaced(connection: sa.Connection, run: str, epoch: int) -> None:
    """Raises RunReplaced if another process has taken the run over since `epoch` began."""
    newest = connection.scalar(sa.select(runs.c.epoch).where(runs.c.id == run))
    if newest != epoch:
        raise RunReplaced(
            f"run must be written by one process at a time, got epoch {newest} where this process began epoch {epoch}: "
            f"{run} was resumed by another one. Nothing of this call was stored. Let the other process continue."
        )


LEASE_DRAWS = 10_000
"""A reservation expires after this many later reservations: its trainer must have died, for a trainer makes two per
iteration. No clock is needed. A resume of the trainer's run releases its reservations at once."""


def is_live() -> sa.ColumnElement[bool]:
    """Whether a row of `draws` is a reservation that has not expired: a commit may still use it."""
    newest = sa.select(buffer_state.c.value).where(buffer_state.c.name == "draws").scalar_subquery()
    # The state is written as a literal, so that the database uses its index of reservations.
    return sa.and_(draws.c.state == sa.literal_column(f"'{RESERVED}'"), draws.c.sequence >= newest - LEASE_DRAWS)
