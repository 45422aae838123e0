"""A query: the trajectories that it chooses, and their order."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from replay.errors import ReplayError
from replay.questions.filters import condition
from replay.storage.format import schema
from replay.storage.format.column_types import ExactText
from replay.storage.format.schema import policies, runs
from replay.storage.staleness import publishes_since

QueryResult = dict[str, Any]
"""An answer of plain JSON values. None is unknown, and no number is NaN."""

RowCondition = sa.ColumnElement[bool]
"""A condition on rows of the buffer. `&` joins two conditions."""

_rows = schema.trajectories.c


class Sort(StrEnum):
    """The columns that a listing can be sorted by. Ties are sorted by iteration, slot, run and id."""

    iteration = "iteration"
    reward = "reward"
    advantage = "advantage"
    success = "success"
    num_turns = "num_turns"
    num_user_turns = "num_user_turns"
    num_tool_calls = "num_tool_calls"
    num_tool_errors = "num_tool_errors"
    num_tokens = "num_tokens"
    uses = "uses"
    staleness = "staleness"
    drift = "drift"
    token_gap_max = "token_gap_max"
    stop_reason = "stop_reason"
    source = "source"


@dataclass(frozen=True)
class Query:
    run: str | None = None
    """None: all runs."""
    filters: Sequence[str] = ()
    """Filters (`replay.questions.filters`), all of which must hold."""
    sort: Sort = Sort.iteration
    ascending: bool = False
    """False: the greatest values come first. Rows whose value is unknown come last in both orders."""


def run_is(run: str | None, column: sa.Column[str]) -> sa.ColumnElement[bool]:
    """Return the condition that a column names this run. None: any run."""
    return sa.true() if run is None else column == run


def chosen(run: str | None, filter: str | None) -> RowCondition:
    """Return the condition for rows of a run (None: of all) that a filter (None: no filter) holds for."""
    mine = run_is(run, _rows.run)
    return mine if filter is None else mine & condition(filter)


def staleness(connection: sa.Connection, run: str | None) -> sa.ColumnElement[int]:
    """Return an expression for the staleness of this run's rows (None: of all runs' rows).

    It is NULL for rows of a run that has published nothing. The expression contains the newest versions as constants,
    because looking them up row by row, as the filter's field does, takes three times as long.
    """
    newest = sa.select(sa.func.max(policies.c.version)).where(policies.c.run == runs.c.id).scalar_subquery()
    query = sa.select(runs.c.id, sa.cast(newest, sa.BigInteger)).where(run_is(run, runs.c.id), newest.is_not(None))
    versions = {id: sa.literal(version, sa.BigInteger) for id, version in connection.execute(query)}
    if run in versions:
        return publishes_since(versions[run], _rows)
    if not versions:
        return sa.cast(sa.null(), sa.BigInteger)
    return publishes_since(sa.case(*((_rows.run == of, version) for of, version in versions.items())), _rows)


def find_one(
    connection: sa.Connection, prefix: str, *queries: sa.Select[tuple[str]], name: str, of: str, advice: str
) -> str:
    """Return the one value of the queries that equals `prefix` or else begins with it. Raises ReplayError."""
    found: list[str] = []
    values = [(query, *query.selected_columns) for query in queries]
    for query, value in values:
        if connection.scalar(query.where(value == prefix)) is not None:
            return prefix
    for query, value in values:
        begins = sa.func.substr(value, 1, len(prefix), type_=ExactText) == prefix
        found += connection.scalars(query.where(begins).order_by(value).limit(3))
    if prefix and len(found) == 1:
        return found[0]
    which = "more than one: " + ", ".join(found) if prefix and found else "none"
    raise ReplayError(f"{name} must be the beginning of one {of}, got {prefix!r}, which begins {which}. {advice}")
