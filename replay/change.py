"""The order in which things changed, by counters of the database: no clock is asked, and none could be trusted.

A counter's row stays locked until the transaction that raised it ends. So a number that can be read has no smaller
one still in flight, and "everything after the last number seen" misses nothing.
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
# What is no number is not equal to itself and nothing.
_IS_NUMBER = (buffer_state.c.value == buffer_state.c.value + 0) & buffer_state.c.value.between(0, 2**62)
_RAISED = buffer_state.update().where(_COUNTER, _IS_NUMBER).values(value=buffer_state.c.value + 1)
_RAISE = _RAISED.returning(buffer_state.c.value)
_LAST = sa.select(buffer_state.c.value).where(_COUNTER)


def next_number(connection: sa.Connection, counter: Counter) -> int:
    """One more than ever before; the counter's row stays locked until the transaction ends."""
    value = execute(connection, _RAISE, counter=counter).scalar_one_or_none()
    if value is None:
        value = last_number(connection, counter) + 1
        connection.execute(buffer_state.insert().values(name=counter, value=value))
    return int(value)


def last_number(connection: sa.Connection, counter: Counter) -> int:
    row = execute(connection, _LAST, counter=counter).one_or_none()
    if row is None:
        return 0
    if type(row.value) is not int or not 0 <= row.value <= 2**62:
        raise DamagedCell(f"buffer_state.value of {counter!r}", "be a whole number", repr(row.value))
    return row.value


def set_state(connection: sa.Connection, ids: Sequence[str], state: str, reason: str | None = None) -> None:
    """The rows' new state, for every reader's next refresh to see."""
    if not ids:
        return
    values = {"state": state, "state_reason": reason, "changed": next_number(connection, "changed")}
    for chunk in chunked(ids):
        connection.execute(trajectories.update().where(trajectories.c.id.in_(chunk)).values(values))
