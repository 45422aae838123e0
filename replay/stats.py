"""Read-only questions. Every answer is plain and JSON-able: what is unknown is None, and no number is NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from context.authors import AuthorTable
from replay import schema
from replay.blobs import decode_log_probs
from replay.errors import ReplayError
from replay.read import load
from replay.records import COMMITTED, REPLAY, RESERVED, STATES, Trajectory
from replay.rows import known
from replay.schema import draws, groups, metrics, policies, runs, tasks, token_scores
from replay.store import ReplayStore
from replay.where import condition

Answer = dict[str, Any]

_rows = schema.trajectories.c

_uses = (
    sa.select(draws.c.trajectory, sa.func.count().label("uses"))
    .where(draws.c.state == COMMITTED)
    .group_by(draws.c.trajectory)
    .subquery()
)
_newest = (
    sa.select(policies.c.run, sa.func.max(policies.c.version).label("version")).group_by(policies.c.run).subquery()
)
_USES = sa.func.coalesce(_uses.c.uses, 0).label("uses")
_STALENESS = (_newest.c.version - _rows.policy_version_min).label("staleness")


class Sort(StrEnum):
    """What a listing can be sorted by; the greatest come first."""

    iteration = "iteration"
    reward = "reward"
    advantage = "advantage"
    turns = "turns"
    tools = "tools"
    tokens = "tokens"
    uses = "uses"
    staleness = "staleness"


_SORTED_BY: dict[Sort, sa.ColumnElement[Any]] = {
    Sort.iteration: _rows.iteration,
    Sort.reward: _rows.reward,
    Sort.advantage: _rows.advantage,
    Sort.turns: _rows.num_turns,
    Sort.tools: _rows.num_tool_calls,
    Sort.tokens: _rows.num_tokens,
    Sort.uses: _USES,
    Sort.staleness: _STALENESS,
}


def _sum(column: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """PostgreSQL makes sums and means of whole numbers decimals, which are no JSON."""
    return sa.cast(sa.func.coalesce(sa.func.sum(column), 0), sa.BigInteger)


def _mean(column: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    return sa.func.avg(sa.cast(column, sa.Double))


_TOTALS = (
    sa.func.count().label("trajectories"),
    _sum(_rows.num_tokens).label("tokens"),
    _sum(_rows.num_action_tokens).label("action_tokens"),
    _sum(sa.cast(_rows.success, sa.Integer)).label("successes"),
    _mean(_rows.reward).label("reward_mean"),
    _mean(_rows.num_turns).label("turns_mean"),
)


def summary(store: ReplayStore, run: str | None = None, *, where: str | None = None) -> Answer:
    """The buffer in numbers, over every stored row; `states` tells the same apart. None: all runs of the database.

    `where`: over the rows of that filter (`replay.where`), their groups, tasks and draws.
    """
    rows = chosen(run, where)
    with store.reading() as connection:
        stops = sa.select(_rows.stop_reason, sa.func.count()).where(rows).group_by(_rows.stop_reason)
        return {
            "database": store.url,
            "bytes": store.size(connection),
            "runs": _count(connection, run, runs.c.id),
            "iterations": _count(connection, run, schema.iterations.c.run),
            "policies": _count(connection, run, policies.c.run),
            **_groups(connection, run, where),
            **connection.execute(sa.select(*_TOTALS).where(rows)).mappings().one(),
            "states": _states(connection, rows),
            "stop_reasons": {row[0]: row[1] for row in connection.execute(stops.order_by(_rows.stop_reason))},
            "draws": _draws(connection, run, where),
        }


def chosen(run: str | None, where: str | None) -> sa.ColumnElement[bool]:
    """Rows of a run, or of all, that a filter holds for."""
    mine = sa.true() if run is None else _rows.run == run
    return mine if where is None else mine & condition(where)


_GROUP_COUNTS = (sa.func.count(sa.distinct(groups.c.task)).label("tasks"), sa.func.count(groups.c.id).label("groups"))


def _groups(connection: sa.Connection, run: str | None, where: str | None) -> Answer:
    query = _of(run, groups.c.run, *_GROUP_COUNTS)
    if where is not None:
        query = query.where(groups.c.id.in_(sa.select(_rows.group).where(chosen(run, where))))
    return dict(connection.execute(query).mappings().one())


def _states(connection: sa.Connection, rows: sa.ColumnElement[bool]) -> Answer:
    query = sa.select(_rows.state, *_TOTALS).where(rows).group_by(_rows.state)
    found = {row.pop("state"): row for row in map(dict, connection.execute(query).mappings())}
    return {state: found[state] for state in STATES if state in found}


def _draws(connection: sa.Connection, run: str | None, where: str | None) -> Answer:
    """Rows that fed updates, by stream, and how old the replayed ones were."""
    mine = sa.true() if run is None else draws.c.run == run
    if where is not None:
        mine = mine & draws.c.trajectory.in_(sa.select(_rows.id).where(condition(where)))
    committed = sa.and_(mine, draws.c.state == COMMITTED)
    streams = sa.select(draws.c.stream, sa.func.count()).where(committed).group_by(draws.c.stream)
    replayed = sa.select(
        sa.func.count(sa.distinct(draws.c.trajectory)).label("trajectories_replayed"),
        _mean(draws.c.staleness).label("staleness_mean"),
        sa.func.max(draws.c.staleness).label("staleness_max"),
        _mean(draws.c.drift_mean).label("drift_mean"),
        sa.func.max(draws.c.drift_max).label("drift_max"),
    ).where(committed, draws.c.stream == REPLAY)
    reserved = sa.select(sa.func.count()).where(mine, draws.c.state == RESERVED)
    return {
        "fresh": 0,
        "replay": 0,
        **{row[0]: row[1] for row in connection.execute(streams)},
        "reserved": connection.scalar(reserved),
        **connection.execute(replayed).mappings().one(),
    }


def trajectories(
    store: ReplayStore,
    run: str | None = None,
    *,
    where: str | None = None,
    success: bool | None = None,
    sort: Sort = Sort.iteration,
    limit: int | None = None,
) -> list[Answer]:
    """One line per trajectory, the greatest in `sort` first; staleness is relative to the run's newest policy."""
    columns = [
        *(_rows[name] for name in ("id", "run", "iteration", "slot", "task", "reward", "success")),
        *(_rows[name] for name in ("num_turns", "num_tool_calls", "num_tokens", "num_action_tokens")),
        *(_rows[name] for name in ("stop_reason", "error_kind", "advantage", "state", "state_reason")),
        _rows.group.label("group"),
        _USES,
        _STALENESS,
    ]
    source = schema.trajectories.outerjoin(_uses, _rows.id == _uses.c.trajectory)
    query = sa.select(*columns).select_from(source.outerjoin(_newest, _rows.run == _newest.c.run))
    query = query.where(chosen(run, where))
    if success is not None:
        query = query.where(_rows.success == success)
    order = [_SORTED_BY[sort].desc().nulls_last(), _rows.iteration.desc(), _rows.slot, _rows.run, _rows.id]
    with store.reading() as connection:
        found = connection.execute(query.order_by(*order).limit(limit)).mappings()
        return [dict(row) for row in found]


def find(store: ReplayStore, id_prefix: str) -> str:
    """The one trajectory whose id is this, or begins so."""
    begins = sa.func.substr(_rows.id, 1, len(id_prefix)) == id_prefix
    with store.reading() as connection:
        found = connection.scalars(sa.select(_rows.id).where(begins).order_by(_rows.id).limit(3)).all()
    if id_prefix and (len(found) == 1 or id_prefix in found):
        return str(found[0])
    which = "none" if not found else "more than one: " + ", ".join(found)
    raise ReplayError(
        f"ID must be the beginning of one trajectory's id, got {id_prefix!r}, which begins {which}. "
        "See: agentloop replay ls"
    )


def trajectory(store: ReplayStore, id_prefix: str) -> Answer:
    """One trajectory whole: its record, tokens, messages, and every update that used it.

    Without tokens where these were evicted. Raises CorruptTrajectory where they are not what was written.
    """
    id = find(store, id_prefix)
    with store.reading() as connection:
        loaded = load(connection, [id])
        found = loaded.gone[id].trajectory if id in loaded.gone else loaded.in_order([id])[0]
        reason = connection.scalar(sa.select(_rows.state_reason).where(_rows.id == id))
        authors = connection.scalar(sa.select(runs.c.authors).where(runs.c.id == found.record.run))
        used = (draws.c.trajectory == id) & (draws.c.state == COMMITTED)
        query = sa.select(draws).where(used).order_by(draws.c.run, draws.c.iteration, draws.c.slot)
        uses = [dict(row) for row in connection.execute(query).mappings()]
        group = connection.execute(sa.select(groups).where(groups.c.id == found.record.group)).mappings().one()
        scored = connection.execute(sa.select(token_scores).where(token_scores.c.trajectory == id)).mappings().all()
        task = connection.execute(sa.select(tasks).where(tasks.c.hash == found.record.task)).mappings().one()
    record = {name: known(value) if isinstance(value, float) else value for name, value in vars(found.record).items()}
    return {
        **record,
        "state_reason": reason,
        "group": dict(group),
        "task": dict(task),
        "segments": _segments(found, AuthorTable.from_json(authors or "[]"), scored),
        "messages": [_message(found, position) for position in range(len(found.messages))],
        "uses": uses,
    }


def _segments(found: Trajectory, authors: AuthorTable, scored: Sequence[sa.RowMapping]) -> list[Answer]:
    answers: list[Answer] = []
    scores = {row["position"]: row for row in scored}
    for position, segment in enumerate(found.segments):
        tokens = segment.tokens
        score = scores.get(position)
        current = None if score is None else decode_log_probs(score["log_probs"], len(tokens)).tolist()
        answers.append(
            {
                "reason": segment.reason,
                "token_ids": tokens.token_ids.tolist(),
                "authors": [authors.name(code) for code in tokens.authors.tolist()],
                "loss_mask": authors.is_trained(tokens.authors).tolist(),
                "behavior_log_probs": [known(value) for value in tokens.behavior_log_probs.tolist()],
                "policy_versions": tokens.policy_versions.tolist(),
                "current_log_probs": None if current is None else [known(value) for value in current],
                "scored_by": None
                if score is None
                else {"run": score["run"], "policy_version": score["policy_version"]},
            }
        )
    return answers


def _message(found: Trajectory, position: int) -> Answer:
    message = found.messages[position]
    calls = [{**vars(call), "arguments": dict(call.arguments)} for call in message.tool_calls]
    return {**vars(message), "tool_calls": calls}


def iterations(store: ReplayStore, run: str | None = None) -> list[Answer]:
    """What each iteration planned and got, in order."""
    table = schema.iterations.c
    query = _of(run, table.run, *table).order_by(table.run, table.iteration)
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def metric_series(store: ReplayStore, run: str) -> dict[str, list[tuple[int, float]]]:
    """(iteration, value) in order, by metric name; values that were not known are left out."""
    query = _of(run, metrics.c.run, metrics.c.name, metrics.c.iteration, metrics.c.value)
    series: dict[str, list[tuple[int, float]]] = {}
    with store.reading() as connection:
        for name, iteration, value in connection.execute(query.order_by(metrics.c.name, metrics.c.iteration)):
            if value is not None and math.isfinite(value):
                series.setdefault(name, []).append((iteration, value))
    return series


def _count(connection: sa.Connection, run: str | None, owner: sa.Column[str]) -> int:
    return connection.scalar(_of(run, owner, sa.func.count(owner))) or 0


def _of(run: str | None, owner: sa.Column[str], *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    query = sa.select(*columns)
    return query if run is None else query.where(owner == run)
