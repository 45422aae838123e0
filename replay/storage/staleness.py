"""Staleness, and how stale a group may be to be fresh.

Staleness is the number of publishes between the policy that sampled a row's oldest token and the policy about to learn,
or the run's newest. It is known only within a row's own run: the staleness of imported rows is unknown. Weights that a
resume took back count too: a row may be newer than the policy, and is then as far from it.
"""

import sys
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from replay.records import OWN_SOURCES


def publishes_since(newest: Any, rows: Any) -> sa.ColumnElement[int]:
    """The staleness of `rows` (columns of `trajectories`) to the policy `newest` of their run; NULL if imported."""
    return sa.case((rows.source.in_(OWN_SOURCES), newest - rows.policy_version_min))


def may_be_fresh(staleness: Iterable[int], bound: int) -> bool:
    """Whether a group's staleness is within `collection.max_staleness`, so that an update may use it as fresh."""
    return max(map(abs, staleness)) <= bound


ESS_BY_AGE = "actor/replay/ess/age_"
"""Prefix of the ESS metrics of the replay stream's age buckets."""


def age_bucket(staleness: int | None) -> str:
    """The bucket of a staleness: 0, 1, 2-3, 4-7, 8-15, ...; `unknown` for rows of other runs."""
    if staleness is None:
        return "unknown"
    if staleness < 2:
        return str(staleness)
    first = 1 << (staleness.bit_length() - 1)
    return f"{first}-{2 * first - 1}"


def age_order(bucket: str) -> int:
    """The key that sorts age buckets: 4 for `4-7`, and the largest integer for unknown ages."""
    first = bucket.partition("-")[0]
    return int(first) if first.isdecimal() else sys.maxsize
