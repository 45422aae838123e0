"""Which experience fed which update: reserved by the draw, committed with the update, rolled back by a resume."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.change import next_number
from replay.read import load, quarantine
from replay.records import (
    COMMITTED,
    ELIGIBLE,
    ORPHANED,
    REPLAY,
    RESERVED,
    UNTRAINABLE,
    DrawRecord,
    IterationRecord,
    Trajectory,
)
from replay.rows import Row, known
from replay.sampling import Candidates, Sampler
from replay.schema import (
    draws,
    groups,
    iterations,
    metrics,
    policies,
    restored_column,
    runs,
    sampler_state,
    trajectories,
)
from replay.validate import check_fields, refused
from replay.write import add_metrics, insert

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrawRequest:
    """What one iteration asks of the buffer."""

    run: str
    iteration: int
    """Its own rows are never drawn, nor later ones."""
    policy_version: int
    """Of the policy that is about to learn; staleness is counted from it."""
    count: int
    first_slot: int
    """Of the iteration's batch; drawn rows take this slot and the ones after it."""
    successful_only: bool


@dataclass(frozen=True)
class Drawn:
    draw: DrawRecord
    trajectory: Trajectory
    """Without its messages, which training does not read."""


@dataclass(frozen=True)
class ResumeReport:
    released: int
    """Reservations of updates that never happened."""
    rolled_back: int
    """Committed draws newer than the checkpoint."""
    orphaned: int
    """Trajectories newer than the checkpoint: kept, never drawn."""
    next_attempt: int
    """For the ids of what is collected from now on; 0 for a run that has collected nothing."""
    sampler_state: dict[str, Any] | None
    """As committed with the iteration resumed from; None before the first."""


def eligible_count(connection: sa.Connection, request: DrawRequest, sampler: Sampler) -> int:
    return int(np.count_nonzero(sampler.weights(_candidates(connection, request)) > 0))


def draw(connection: sa.Connection, request: DrawRequest, sampler: Sampler) -> list[Drawn]:
    candidates = _candidates(connection, request)
    weights = sampler.weights(candidates)
    shares = weights / weights.sum() if weights.any() else weights
    left = weights.copy()
    drawn: list[Drawn] = []
    while len(drawn) < request.count and left.any():
        chosen = sampler.select(left, request.count - len(drawn))
        left[chosen] = 0.0
        for position, trajectory in _load_whole(connection, candidates, chosen):
            slot = request.first_slot + len(drawn)
            drawn.append(_reserved(request, slot, trajectory, probability=float(shares[position])))
    reserve(connection, [row.draw for row in drawn])
    return drawn


def _load_whole(
    connection: sa.Connection, candidates: Candidates, chosen: npt.NDArray[np.intp]
) -> list[tuple[int, Trajectory]]:
    ids = {candidates.ids[position]: int(position) for position in chosen}
    loaded = load(connection, list(ids), with_messages=False)
    if loaded.corrupt:
        quarantine(connection, loaded.corrupt)
        for id, reason in loaded.corrupt.items():
            _log.warning("trajectory %s quarantined: %s", id, reason)
    return [(position, loaded.whole[id]) for id, position in ids.items() if id in loaded.whole]


def _reserved(request: DrawRequest, slot: int, trajectory: Trajectory, *, probability: float) -> Drawn:
    own = trajectory.record.run == request.run
    record = DrawRecord(
        run=request.run,
        iteration=request.iteration,
        slot=slot,
        trajectory=trajectory.id,
        stream=REPLAY,
        probability=probability,
        staleness=request.policy_version - trajectory.record.policy_version_min if own else None,
    )
    return Drawn(record, trajectory)


def _candidates(connection: sa.Connection, request: DrawRequest) -> Candidates:
    """In the order of (iteration, slot): ids change when a run is resumed, and selection must not."""
    others = [run for run in _comparable_runs(connection, request.run) if run != request.run]
    found = connection.execute(_candidates_query(request, others)).all()
    ids, rates = zip(*found, strict=True) if found else ((), ())
    return Candidates(restored_column(ids), np.array(rates, dtype=np.float64))


def _candidates_query(request: DrawRequest, others: Sequence[str]) -> sa.Select[Any]:
    rows = trajectories.c
    earlier = (rows.run == request.run) & (rows.iteration < request.iteration)
    query = (
        # Ids as the database has them: a row at a time, ExactText takes longer than the query.
        sa.select(sa.type_coerce(rows.id, sa.Text), groups.c.success_rate)
        .join_from(trajectories, groups, rows.group == groups.c.id)
        .where(rows.state == ELIGIBLE, earlier | rows.run.in_(others))
        .order_by(rows.iteration, rows.slot, rows.run, rows.id)
    )
    return query.where(rows.success) if request.successful_only else query


def _comparable_runs(connection: sa.Connection, run: str) -> list[str]:
    """Runs whose tokens mean the same: the same author table and tokenizer."""
    tokenizers: dict[str, set[str]] = {}
    authors: dict[str, str] = {}
    query = sa.select(runs.c.id, runs.c.authors_hash, policies.c.tokenizer_hash).outerjoin(policies).distinct()
    for id, table, tokenizer in connection.execute(query):
        authors[id] = table
        tokenizers.setdefault(id, set()).add(tokenizer)
    return [id for id in authors if (authors[id], tokenizers[id]) == (authors.get(run), tokenizers.get(run))]


def reserve(connection: sa.Connection, records: Sequence[DrawRecord]) -> None:
    if not records:
        return
    check_fields(records, "iteration", "iteration")
    taken = set(connection.scalars(_of(records[0].run, records[0].iteration, draws.c.slot)))
    for record in records:
        if record.slot in taken:
            where = f"iteration {record.iteration}"
            raise refused("slot", "be reserved once; resume the run to release it", record.slot, where)
        taken.add(record.slot)
    stamp = {"state": RESERVED, "sequence": next_number(connection, "draws")}
    insert(connection, draws, [{**_row(record), **stamp} for record in records])


def _of(run: str, iteration: int, *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    return sa.select(*columns).where(draws.c.run == run, draws.c.iteration == iteration)


def _row(record: DrawRecord) -> Row:
    return {name: known(value) if isinstance(value, float) else value for name, value in vars(record).items()}


def commit(
    connection: sa.Connection,
    iteration: IterationRecord,
    records: Sequence[DrawRecord],
    *,
    sampler_state: Mapping[str, Any],
) -> None:
    where = f"iteration {iteration.iteration}"
    check_fields([iteration], "iteration", "iteration")
    given = {record.slot: record.trajectory for record in records}
    query = _of(iteration.run, iteration.iteration, draws.c.slot, draws.c.trajectory)
    reserved = {row.slot: row.trajectory for row in connection.execute(query.where(draws.c.state == RESERVED))}
    if given != reserved:
        odd = min(slot for slot in {*given, *reserved} if given.get(slot) != reserved.get(slot))
        raise refused(f"draws[{odd}].trajectory", f"be the reserved {reserved.get(odd)!r}", given.get(odd), where)
    connection.execute(draws.delete().where(draws.c.run == iteration.run, draws.c.iteration == iteration.iteration))
    insert(connection, draws, [{**_row(record), "state": COMMITTED} for record in records])
    row = {name: value for name, value in vars(iteration).items() if name != "metrics"}
    connection.execute(iterations.insert().values(row))
    add_metrics(connection, iteration.run, iteration.iteration, iteration.metrics)
    _save_sampler(connection, iteration, sampler_state)


def _save_sampler(connection: sa.Connection, iteration: IterationRecord, state: Mapping[str, Any]) -> None:
    row = {"run": iteration.run, "iteration": iteration.iteration, "state": json.dumps(dict(state))}
    connection.execute(sampler_state.insert().values(row))


def resume(connection: sa.Connection, run: str, iteration: int) -> ResumeReport:
    mine = draws.c.run == run
    released = connection.execute(draws.delete().where(mine, draws.c.state == RESERVED)).rowcount
    rolled_back = connection.execute(draws.delete().where(mine, draws.c.iteration > iteration)).rowcount
    for table in (iterations, metrics, sampler_state):
        connection.execute(table.delete().where(table.c.run == run, table.c.iteration > iteration))
    # An iteration ends with one publish: what came after the last one kept is gone.
    last = connection.scalar(sa.select(sa.func.max(iterations.c.policy_version)).where(iterations.c.run == run))
    newest = 0 if last is None else last + 1
    connection.execute(policies.delete().where(policies.c.run == run, policies.c.version > newest))
    later = trajectories.update().where(
        trajectories.c.run == run,
        trajectories.c.iteration > iteration,
        trajectories.c.state.in_([ELIGIBLE, UNTRAINABLE]),
    )
    stamp = {"state": ORPHANED, "changed": next_number(connection, "changed")}
    orphaned = connection.execute(later.values(stamp)).rowcount
    query = sa.select(sampler_state.c.state).where(sampler_state.c.run == run, sampler_state.c.iteration == iteration)
    stored = connection.scalar(query)
    return ResumeReport(
        released,
        rolled_back,
        orphaned,
        _next_attempt(connection, run),
        json.loads(stored) if stored is not None else None,
    )


def _next_attempt(connection: sa.Connection, run: str) -> int:
    query = sa.select(sa.func.max(trajectories.c.attempt)).where(trajectories.c.run == run)
    highest = connection.scalar(query)
    return 0 if highest is None else int(highest) + 1
