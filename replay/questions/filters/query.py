"""Which trajectories a query is about."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from replay.questions.filters import condition
from replay.storage.format import schema
from replay.storage.format.schema import policies, runs
from replay.storage.staleness import publishes_since

QueryResult = dict[str, Any]
"""Plain and JSON-able: what is unknown is None, and no number is NaN."""

RowCondition = sa.ColumnElement[bool]
"""Over the rows of the buffer; `&` joins two of them."""

_rows = schema.trajectories.c


class Sort(StrEnum):
    """What a listing can be sorted by; rows of the same value follow their iteration, slot, run and id."""

    iteration = "iteration"
    reward = "reward"
    advantage = "advantage"
    success = "success"
    num_turns = "num_turns"
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
    """None: of all runs."""
    filters: Sequence[str] = ()
    """Python expressions (`replay.questions.filters`) that all hold."""
    sort: Sort = Sort.iteration
    ascending: bool = False
    """The greatest come first; rows whose value is unknown come last either way."""


def run_is(run: str | None, column: sa.Column[str]) -> sa.ColumnElement[bool]:
    """The condition that a column names this run; None: any."""
    return sa.true() if run is None else column == run


def chosen(run: str | None, filter: str | None) -> RowCondition:
    """Rows of a run, or of all, that a filter holds for."""
    mine = run_is(run, _rows.run)
    return mine if filter is None else mine & condition(filter)


def staleness(connection: sa.Connection, run: str | None) -> sa.ColumnElement[int]:
    """The staleness of this run's rows, or of all runs'; NULL for those of a run that has published nothing.

    To look up the newest policy row by row would take three times as long (`replay.questions.filters.fields`).
    """
    newest = sa.select(sa.func.max(policies.c.version)).where(policies.c.run == runs.c.id).scalar_subquery()
    query = sa.select(runs.c.id, sa.cast(newest, sa.BigInteger)).where(run_is(run, runs.c.id), newest.is_not(None))
    versions = {id: sa.literal(version, sa.BigInteger) for id, version in connection.execute(query)}
    if run in versions:
        return publishes_since(versions[run], _rows)
    if not versions:
        return sa.cast(sa.null(), sa.BigInteger)
    return publishes_since(sa.case(*((_rows.run == of, version) for of, version in versions.items())), _rows)
