"""When a reservation counts: one rule for draws, for limits on uses and for what may be evicted."""

from __future__ import annotations

import sqlalchemy as sa

from replay.records import RESERVED
from replay.schema import buffer_state, draws

LEASE_DRAWS = 10_000
"""A reservation counts until so many reservations have been made after it: its trainer has died. A trainer makes two
in an iteration. No clock is asked, and a resume of the trainer's run releases its reservations at once."""


def is_live() -> sa.ColumnElement[bool]:
    """Whether a row of `draws` is a reservation that still counts, and that a commit may still use."""
    newest = sa.select(buffer_state.c.value).where(buffer_state.c.name == "draws").scalar_subquery()
    return sa.and_(draws.c.state == RESERVED, draws.c.sequence >= newest - LEASE_DRAWS)
