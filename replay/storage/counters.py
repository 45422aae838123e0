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
from replay.storage.statements import execute

Counter = Literal["changed", "draws"]

_COUNTER = buffer_state.c.name == sa.bindparam("counter")
_LAST = sa.select(buffer_state.c.value).where(_COUNTER)
_SET = buffer_state.update().where(_COUNTER).values(value=sa.bindparam("number"))


def next_number(connection: sa.Connection, counter: Counter) -> int:
    """Raise a counter by one and return it. Write transactions run one after another, so nobody else raises it."""
    number = last_number(connection, counter) + 1
    execute(connection, _SET, counter=counter, number=number)
    return number


def last_number(connection: sa.Connection, counter: Counter) -> int:
    """The value of a counter. Raises DamagedDatabase if the value is missing or no valid number."""
    value = execute(connection, _LAST, counter=counter).scalar_one_or_none()
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


_RUN = runs.c.id == sa.bindparam("run")
_EPOCH = sa.select(runs.c.epoch).where(_RUN)
_NEXT = runs.update().where(_RUN).values(epoch=runs.c.epoch + 1, ended=False).returning(runs.c.epoch)


def take_over(connection: sa.Connection, run: str) -> int:
    """Begin the run's next epoch and return it. Processes of earlier epochs can no longer write the run, which has not
    ended any more."""
    epoch = execute(connection, _NEXT, run=run).scalar_one_or_none()
    if epoch is None:
        raise ReplayError(f"run must be a stored one, got {run!r}. Add it first.")
    return int(epoch)


def refuse_replaced(connection: sa.Connection, run: str, epoch: int) -> None:
    """Raises RunReplaced if another process has taken the run over since `epoch` began."""
    newest = execute(connection, _EPOCH, run=run).scalar()
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
