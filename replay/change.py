"""The order in which things changed, by counters of the database: no clock is asked, and none could be trusted.

A transaction that raises a counter ends before the next one begins. So a number that can be read has no smaller one
still in flight, and "everything after the last number seen" misses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import sqlalchemy as sa

from replay.errors import DamagedCell
from replay.prepared import execute
from replay.rows import chunked
from replay.schema import buffer_state, trajectories

Counter = Literal["changed", "draws"]

_COUNTER = buffer_state.c.name == sa.bindparam("counter")
_LAST = sa.select(buffer_state.c.value).where(_COUNTER)
_SET = buffer_state.update().where(_COUNTER).values(value=sa.bindparam("number"))


def next_number(connection: sa.Connection, counter: Counter) -> int:
    """One more than ever before. Write transactions come one after another: nobody else raises it meanwhile."""
    number = last_number(connection, counter) + 1
    execute(connection, _SET, counter=counter, number=number)
    return number


def last_number(connection: sa.Connection, counter: Counter) -> int:
    """Raises DamagedCell for a counter that is gone, or is no number."""
    value = execute(connection, _LAST, counter=counter).scalar_one_or_none()
    if type(value) is not int or not 0 <= value <= 2**62:
        raise DamagedCell(f"buffer_state.value of {counter!r}", "be a whole number", repr(value))
    return value


def set_state(connection: sa.Connection, ids: Sequence[str], state: str, reason: str | None = None) -> None:
    """The rows' new state, for every reader's next refresh to see."""
    if not ids:
        return
    values = {"state": state, "state_reason": reason, "changed": next_number(connection, "changed")}
    for chunk in chunked(ids):
        connection.execute(trajectories.update().where(trajectories.c.id.in_(chunk)).values(values))
