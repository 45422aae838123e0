"""What staleness is, and its bounds, all of them: how old rows may be to be replayed, and how old a group to be fresh.

Staleness is the number of publishes between the policy that sampled a row's oldest token and the one about to learn, or
a run's newest. Only a row's own run counts it: of rows from elsewhere, also attached ones, it is unknown.
Weights that a resume took back count too: then a row is newer than the policy, and as far from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.records import OWN_SOURCES

if TYPE_CHECKING:
    from replay.mixing.request import Limits

Mask = npt.NDArray[np.bool_]


def publishes_since(newest: Any, rows: Any) -> sa.ColumnElement[int]:
    """Rows' staleness to the policy `newest` of their run, over the columns of `trajectories`; NULL: imported rows."""
    return sa.case((rows.source.in_(OWN_SOURCES), newest - rows.policy_version_min))


def may_be_replayed(limits: Limits, known: Mask, staleness: npt.NDArray[Any]) -> Iterator[tuple[str, Mask]]:
    """[N] rows that each bound lets a draw take, by its key of `replay`; `known` is False for rows of other runs."""
    if limits.unknown_staleness == "refuse":
        yield "unknown_staleness", known
    if limits.max_staleness is not None:
        yield "max_staleness", ~known | (staleness <= limits.max_staleness)


def may_be_fresh(staleness: Iterable[int], bound: int) -> bool:
    """Whether a group so stale feeds an update as fresh, by `collection.max_staleness`; if not, it waits for replay."""
    return max(map(abs, staleness)) <= bound
