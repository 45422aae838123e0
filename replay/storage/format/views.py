"""Views for people. A fact has the same name here as in filters, pages and DataFrames. See docs/schema.md."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.functions import coalesce

from replay.records import COMMITTED, HINDSIGHT, ORPHANED
from replay.storage.format.schema import (
    draws,
    groups,
    held_out,
    iterations,
    metrics,
    policies,
    reclaimed,
    run_labels,
    runs,
    tasks,
    trajectories,
    trajectory_labels,
)
from replay.storage.staleness import publishes_since

_rows, _left = trajectories.c, reclaimed.c
_NEWEST = sa.select(sa.func.max(policies.c.version)).where(policies.c.run == _rows.run).correlate(trajectories)
STALENESS = publishes_since(_NEWEST.scalar_subquery(), _rows)
"""The staleness of a row today; NULL also if its run has published nothing."""


def _last_drawn(column: sa.Column[Any]) -> sa.ScalarSelect[Any]:
    """A column of the draw by which an update last used the row: the draw with the greatest iteration of any run."""
    mine = (draws.c.trajectory == _rows.id) & (draws.c.state == COMMITTED)
    newest = sa.select(column).where(mine).order_by(draws.c.iteration.desc(), draws.c.run, draws.c.slot).limit(1)
    return newest.correlate(trajectories).scalar_subquery()


DRIFT, TOKEN_GAP_MAX = _last_drawn(draws.c.drift_mean), _last_drawn(draws.c.token_gap_max)
"""NULL if no update has used the row, or if none of its tokens has a behavior log-prob."""
_SPACES = sa.func.length(_rows.error_kinds) - sa.func.length(sa.func.replace(_rows.error_kinds, " ", ""))
NUM_TOOL_ERRORS: sa.ColumnElement[int] = coalesce(_SPACES + 1, 0, type_=sa.BigInteger)


def counts_as_attempts(of: sa.FromClause) -> sa.ColumnElement[bool]:
    """A condition for groups that count as attempts at their task. Groups of an iteration that a resume undid, and of
    hindsight, do not."""
    stored = sa.exists().where(_rows.group == of.c.id, sa.or_(_rows.state == ORPHANED, _no_attempt(_rows)))
    left = sa.exists().where(_left.group == of.c.id, _no_attempt(_left))
    return ~stored.correlate(of) & ~left.correlate(of)


def _no_attempt(columns: Any) -> sa.ColumnElement[bool]:
    """Whether a row does not count as an attempt. An index has the same text."""
    hindsight, orphaned, nothing = (sa.literal_column(f"'{text}'", sa.Text) for text in (HINDSIGHT, ORPHANED, ""))
    without: sa.ColumnElement[str] = sa.func.replace(columns.state_reason, orphaned, nothing)
    return sa.or_(columns.source == hindsight, without != columns.state_reason)


COUNTS_AS_ATTEMPTS = counts_as_attempts(groups)
IS_EPISODE = (_rows.state != ORPHANED) & (_rows.source != HINDSIGHT)
"""A condition for stored rows that are episodes: a resume has not undone them, and they are not made from others."""
WAS_EPISODE = ~_no_attempt(_left)
"""The same condition for evicted rows."""
WITHOUT_SIGNAL = (groups.c.size < 2) | (groups.c.reward_std == 0.0)
"""A condition for groups whose members all have the same reward: there is nothing to compare."""


def _of_group(column: sa.Column[Any]) -> sa.ScalarSelect[Any]:
    return sa.select(column).where(groups.c.id == _rows.group).correlate(trajectories).scalar_subquery()


DERIVED: Mapping[str, sa.ColumnElement[Any]] = {
    "num_tool_errors": NUM_TOOL_ERRORS,
    "staleness": STALENESS,
    "drift": DRIFT,
    "token_gap_max": TOKEN_GAP_MAX,
    "group_size": _of_group(groups.c.size),
    "group_success": _of_group(groups.c.success_rate),
    "group_reward": _of_group(groups.c.reward_mean),
}
"""Columns that follow from other tables, by name."""
_INTERNAL = {"changed", "segments_checksum", "record_checksum", "content_hash", "agent_rewards"}
TRAJECTORY_COLUMNS: dict[str, sa.ColumnElement[Any]] = {
    **{column.name: column for column in trajectories.columns if column.name not in _INTERNAL},
    **DERIVED,
}


def _labelled(columns: Mapping[str, sa.ColumnElement[Any]]) -> list[sa.Label[Any]]:
    return [column.label(name) for name, column in columns.items()]


def _draws() -> sa.Select[Any]:
    """The query for draws, with a few facts of their rows. A row itself may be gone."""
    shown = [column for column in draws.columns if column.name != "sequence"]
    kept = {name: coalesce(_rows[key], _left[key]) for name, key in (("source", "source"), ("group_id", "group"))}
    kept |= {name: coalesce(_rows[name], _left[name]) for name in ("reward", "success")}
    joined = draws.outerjoin(trajectories, _rows.id == draws.c.trajectory).outerjoin(
        reclaimed, _left.id == draws.c.trajectory
    )
    task = sa.select(groups.c.task).where(groups.c.id == kept["group_id"]).scalar_subquery()
    return sa.select(*shown, *_labelled({**kept, "task": task})).select_from(joined)


def _tasks() -> sa.Select[Any]:
    """The query for tasks: a row for each run and task that was tried."""
    one = groups.alias("one")
    mine = (one.c.task == groups.c.task) & (one.c.run == groups.c.run) & counts_as_attempts(one)

    def success(order: sa.ColumnElement[Any]) -> sa.ScalarSelect[Any]:
        query = sa.select(one.c.success_rate).where(mine).order_by(order, one.c.id).limit(1)
        return query.correlate(groups).scalar_subquery()

    attempts = sa.cast(sa.func.sum(groups.c.size), sa.BigInteger)
    columns: dict[str, sa.ColumnElement[Any]] = {
        "run": groups.c.run,
        "task": groups.c.task,
        "environment": tasks.c.environment,
        "payload": tasks.c.payload,
        "num_groups": sa.func.count(),
        "attempts": attempts,
        "success_rate": sa.func.sum(groups.c.size * groups.c.success_rate) / attempts,
        "reward_mean": sa.func.sum(groups.c.size * groups.c.reward_mean) / attempts,
        "first_iteration": sa.func.min(groups.c.iteration),
        "latest_iteration": sa.func.max(groups.c.iteration),
        "first_success": success(one.c.iteration.asc()),
        "latest_success": success(one.c.iteration.desc()),
        "best_success": sa.func.max(groups.c.success_rate),
    }
    keys = (groups.c.run, groups.c.task, tasks.c.environment, tasks.c.payload)
    return sa.select(*_labelled(columns)).join_from(groups, tasks).where(COUNTS_AS_ATTEMPTS).group_by(*keys)


def _labels() -> sa.Select[Any]:
    """The query for labels of trajectories and of runs."""
    said = ("label", "note", "made_by", "created_at")
    mine, of = trajectory_labels.c, run_labels.c
    rows = sa.select(_rows.run, mine.trajectory, *(mine[name] for name in said)).join_from(
        trajectory_labels, trajectories
    )
    whole = sa.select(of.run, sa.cast(sa.null(), sa.Text).label("trajectory"), *(of[name] for name in said))
    return sa.select(sa.union_all(rows, whole).subquery("each"))


_SAID = {"num_messages", "said", "checksum"}
VIEWS: Mapping[str, sa.Select[Any]] = {
    "v_runs": sa.select(runs.c.id.label("run"), runs.c.name, runs.c.started_at, runs.c.ended, runs.c.code_version),
    "v_trajectories": sa.select(*_labelled(TRAJECTORY_COLUMNS)),
    "v_groups": sa.select(*groups.columns, WITHOUT_SIGNAL.label("without_signal")).where(COUNTS_AS_ATTEMPTS),
    "v_draws": _draws(),
    "v_tasks": _tasks(),
    "v_iterations": sa.select(*iterations.columns),
    "v_metrics": sa.select(*metrics.columns),
    "v_labels": _labels(),
    "v_held_out": sa.select(*(column for column in held_out.columns if column.name not in _SAID)),
}


def create_views(connection: sa.Connection) -> None:
    """Create all views; the database raises an error if one exists."""
    for name, query in VIEWS.items():
        text = query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
        connection.execution_options(no_parameters=True).exec_driver_sql(f"CREATE VIEW {name} AS {text}")
