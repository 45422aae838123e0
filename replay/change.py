"""The order in which things changed, by counters of the database: no clock is asked, and none could be trusted.

A counter's row stays locked until the transaction that raised it ends. So a number that can be read has no smaller
one still in flight, and "everything after the last number seen" misses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import sqlalchemy as sa

from replay.prepared import execute
from replay.rows import chunked
from replay.schema import buffer_state, trajectories

Counter = Literal["changed", "draws"]


_COUNTER = buffer_state.c.name == sa.bindparam("counter")
_RAISE = buffer_state.update().where(_COUNTER).values(value=buffer_state.c.value + 1).returning(buffer_state.c.value)
_LAST = sa.select(buffer_state.c.value).where(_COUNTER)


def next_number(connection: sa.Connection, counter: Counter) -> int:
    """One more than ever before; the counter's row stays locked until the transaction ends."""
    value = execute(connection, _RAISE, counter=counter).scalar_one_or_none()
    if value is None:
        value = 1
        connection.execute(buffer_state.insert().values(name=counter, value=value))
    return int(value)


def last_number(connection: sa.Connection, counter: Counter) -> int:
    return int(execute(connection, _LAST, counter=counter).scalar() or 0)


def set_state(connection: sa.Connection, ids: Sequence[str], state: str, reason: str | None = None) -> None:
    """The rows' new state, for every reader's next refresh to see."""
    if not ids:
        return
    values = {"state": state, "state_reason": reason, "changed": next_number(connection, "changed")}
    for chunk in chunked(ids):
        connection.execute(trajectories.update().where(trajectories.c.id.in_(chunk)).values(values))
