"""Which experience fed which update: reserved by the draw, committed with the update, rolled back by a resume."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from replay.request import Availability, DrawRequest, Pick
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


def available(connection: sa.Connection, request: DrawRequest, sampler: Sampler) -> Availability:
    candidates = _candidates(connection, request)
    weights = sampler.weights(candidates)
    complete = _complete(candidates, weights)
    rows, groups = Counter[tuple[str, str]](), Counter[tuple[str, int]]()
    for position in np.flatnonzero(weights).tolist():
        task, size = candidates.tasks[position], int(candidates.group_sizes[position])
        for name in _names(candidates, position, request.run):
            rows[name, task] += 1
            groups[name, size] += bool(complete[position])
    whole = [int(size) for size in candidates.group_sizes[complete]]
    sources = Counter[str]()
    for (name, _), count in rows.items():
        sources[name] += count
    return Availability(
        rows=int(np.count_nonzero(weights)),
        by_source=sources,
        by_task=Counter(candidates.tasks[weights > 0].tolist()),
        by_source_task=rows,
        groups={size: count // size for size, count in Counter(whole).items()},
        by_source_groups={key: count // key[1] for key, count in groups.items() if count},
        by_task_reward=Counter(
            zip(candidates.tasks[weights > 0].tolist(), candidates.rewards[weights > 0].tolist(), strict=True)
        ),
    )


def _names(candidates: Candidates, position: int, run: str) -> Iterator[str]:
    """What a pick may call the row's source."""
    yield candidates.sources[position]
    if candidates.runs[position] != run:
        yield candidates.runs[position]


def _complete(candidates: Candidates, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """[N]: every member of the row's group has a weight."""
    members = Counter(candidates.groups[weights > 0].tolist())
    found = np.array([members[group] for group in candidates.groups], np.int64)
    complete: npt.NDArray[np.bool_] = found == candidates.group_sizes
    return complete


def draw(connection: sa.Connection, request: DrawRequest, sampler: Sampler) -> list[Drawn]:
    candidates = _candidates(connection, request)
    weights = sampler.weights(candidates)
    drawn: list[Drawn] = []
    for pick in request.picks:
        mine = weights * _asked(candidates, pick)
        take = _draw_groups if pick.unit == "group" else _draw_rows
        for position, probability, trajectory in take(connection, candidates, mine, pick.count, sampler):
            weights[position] = 0.0
            slot = request.first_slot + len(drawn)
            drawn.append(_reserved(request, slot, trajectory, probability=probability))
    reserve(connection, [row.draw for row in drawn])
    return drawn


def _asked(candidates: Candidates, pick: Pick) -> npt.NDArray[np.bool_]:
    asked = np.ones(len(candidates), np.bool_)
    if pick.source is not None:
        asked &= (candidates.sources == pick.source) | (candidates.runs == pick.source)
    if pick.task is not None:
        asked &= candidates.tasks == pick.task
    if pick.size is not None:
        asked &= candidates.group_sizes == pick.size
    if pick.reward_other_than is not None:
        asked &= candidates.rewards != pick.reward_other_than
    return asked


def _draw_rows(
    connection: sa.Connection, candidates: Candidates, weights: npt.NDArray[np.float64], count: int, sampler: Sampler
) -> list[tuple[int, float, Trajectory]]:
    shares = weights / weights.sum() if weights.any() else weights
    left = weights.copy()
    drawn: list[tuple[int, float, Trajectory]] = []
    while len(drawn) < count and left.any():
        chosen = sampler.select(left, count - len(drawn))
        left[chosen] = 0.0
        loaded = _load_whole(connection, candidates, chosen)
        drawn += [(position, float(shares[position]), trajectory) for position, trajectory in loaded]
    return drawn


def _draw_groups(
    connection: sa.Connection, candidates: Candidates, weights: npt.NDArray[np.float64], count: int, sampler: Sampler
) -> list[tuple[int, float, Trajectory]]:
    """Whole groups; one weighs the mean of its members, and a group with a corrupt member is no longer whole."""
    weights = np.where(_complete(candidates, weights), weights, 0.0)
    names = list(dict.fromkeys(candidates.groups[weights > 0].tolist()))
    members = [np.flatnonzero(candidates.groups == name) for name in names]
    left = np.array([weights[positions].mean() for positions in members])
    shares = left / left.sum() if left.any() else left
    drawn: list[tuple[int, float, Trajectory]] = []
    while len(drawn) < count:
        left[[len(positions) > count - len(drawn) for positions in members]] = 0.0
        if not left.any():
            break
        (group,) = sampler.select(left, 1).tolist()
        left[group] = 0.0
        loaded = _load_whole(connection, candidates, members[group])
        if len(loaded) == len(members[group]):
            drawn += [(position, float(shares[group]), trajectory) for position, trajectory in loaded]
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
    columns = list(zip(*found, strict=True)) if found else [()] * 8
    sources, owners, of_tasks, of_groups = (np.array(restored_column(column), object) for column in columns[1:5])
    rates, sizes = np.array(columns[5], np.float64), np.array(columns[6], np.int64)
    rewards = np.array(columns[7], np.float64)
    return Candidates(restored_column(columns[0]), rates, sources, owners, of_tasks, of_groups, sizes, rewards)


def _candidates_query(request: DrawRequest, others: Sequence[str]) -> sa.Select[Any]:
    rows = trajectories.c
    earlier = (rows.run == request.run) & (rows.iteration < request.iteration)
    texts = (rows.id, rows.source, rows.run, rows.task, rows.group)
    columns: list[sa.ColumnElement[Any]] = [sa.type_coerce(text, sa.Text) for text in texts]
    query: sa.Select[Any] = (
        # Texts as the database has them: a row at a time, ExactText takes longer than the query.
        sa.select(*columns, groups.c.success_rate, groups.c.size, rows.reward)
        .join_from(trajectories, groups, rows.group == groups.c.id)
        .where(rows.state == ELIGIBLE, earlier | rows.run.in_(others))
        .order_by(rows.iteration, rows.slot, rows.run, rows.id)
    )
    limits = request.limits
    if limits.sources is not None:
        query = query.where(rows.source.in_(limits.sources) | rows.run.in_(limits.sources))
    return query.where(rows.success) if limits.successful_only else query


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
