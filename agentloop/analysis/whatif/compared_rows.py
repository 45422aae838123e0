"""Which stored rows `replay whatif` looks at, and in which role."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import sqlalchemy as sa

from agentloop.analysis.whatif.result import LeftOut
from agentloop.config import RunConfig
from agentloop.runs.run_folder import RunFolder
from replay import queries
from replay.queries import chosen
from replay.records import COMMITTED, ELIGIBLE, REPLAY, BatchRow, DrawRecord, Trajectory, age_bucket
from replay.sampling.compatibility import bits, names_of, run_mismatches, sampling_mismatch
from replay.storage.format.schema import draws, trajectories
from replay.storage.read import load
from replay.store import ReplayStore

Stream = Literal["fresh", "replay"]
_MOST_NAMED = 10
_rows = trajectories.c


@dataclass(frozen=True)
class RowChoice:
    """Which rows, as the command line says it."""

    filter: str | None = None
    limit: int | None = None
    """Of rows of the buffer."""
    iteration: int | None = None
    """The batch of this iteration instead of the buffer, whole and as it was."""


@dataclass(frozen=True)
class Row:
    """A stored trajectory in its role, and the bucket that it is counted in."""

    item: BatchRow
    bucket: str


@dataclass
class Chosen:
    rows: list[Row] = field(default_factory=list)
    found: int = 0
    """Rows to choose from, before the limit."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Ids by reason."""

    def leave_out(self, why: str, id: str) -> None:
        self.left_out.setdefault(why, []).append(id)

    def reasons(self) -> tuple[LeftOut, ...]:
        return tuple(LeftOut(why, len(ids), tuple(ids[:_MOST_NAMED])) for why, ids in self.left_out.items())


@dataclass(frozen=True)
class _Candidate:
    id: str
    stream: Stream
    advantage: float | None
    staleness: int | None
    bucket: str


def buckets_of(rows: Sequence[Row]) -> list[str]:
    """Fresh rows of an iteration first, then by age, the unknown one last."""

    def age(bucket: str) -> tuple[int, int]:
        head = bucket.partition("-")[0]
        return (1, int(head)) if head.isdecimal() else (0 if bucket == "fresh" else 2, 0)

    return sorted({row.bucket for row in rows}, key=age)


def made_in_the_batch(config: RunConfig) -> bool:
    """True: an advantage depends on what else is in the batch, so the one stored at birth is not what is trained."""
    return config.algorithm == "ppo" or config.replay.baseline != "stored" or config.advantage.normalise_batch != "none"


def rows_in_words(asked: RowChoice) -> str:
    where = "" if asked.filter is None else f" where {asked.filter}"
    if asked.iteration is not None:
        return f"the batch of iteration {asked.iteration}{where}"
    return f"stored rows{where}, as replayed"


def advantages_in_words(config: RunConfig, asked: RowChoice) -> str:
    if asked.iteration is not None:
        return f"those of iteration {asked.iteration}"
    return "those of the last update that used the row" if made_in_the_batch(config) else "those of the row's birth"


def choose_rows(store: ReplayStore, folder: RunFolder, version: int, asked: RowChoice) -> Chosen:
    """Rows that the policy `version` of the run could have been given, read whole.

    More than the limit are thinned evenly in the order of (iteration, slot), so that every age stays.
    """
    taken = Chosen()
    if asked.iteration is None:
        candidates = _of_buffer(store, folder, version, asked, taken)
    else:
        candidates = _of_iteration(store, folder, asked, taken)
    taken.found = len(candidates)
    if asked.iteration is None and asked.limit is not None and len(candidates) > asked.limit:
        candidates = [candidates[place * len(candidates) // asked.limit] for place in range(asked.limit)]
    with store.reading() as connection:
        loaded = load(connection, [candidate.id for candidate in candidates], with_messages=False)
    for candidate in candidates:
        if candidate.id in loaded.whole:
            taken.rows.append(_row(candidate, loaded.whole[candidate.id]))
        elif candidate.id in loaded.corrupt:
            taken.leave_out("corrupt: agentloop replay verify says why", candidate.id)
        else:
            taken.leave_out("its tokens are gone", candidate.id)
    return taken


def _row(candidate: _Candidate, trajectory: Trajectory) -> Row:
    assert candidate.advantage is not None
    record = trajectory.record
    draw = DrawRecord(
        run=record.run,
        iteration=record.iteration,
        slot=record.slot,
        trajectory=record.id,
        stream=candidate.stream,
        probability=None,
        staleness=candidate.staleness,
    )
    return Row(BatchRow(trajectory, draw, advantage=candidate.advantage), candidate.bucket)


def _of_buffer(
    store: ReplayStore, folder: RunFolder, version: int, asked: RowChoice, taken: Chosen
) -> list[_Candidate]:
    config, run = folder.config, folder.run_id
    of_draws = made_in_the_batch(config)
    wanted = [chosen(None, asked.filter), _rows.state == ELIGIBLE, _rows.num_action_tokens > 0, _rows.temperature > 0]
    columns = (_rows.id, _rows.run, _rows.policy_version_min, _rows.advantage, sampling_mismatch(_rows))
    query = sa.select(*columns).where(*wanted).order_by(_rows.iteration, _rows.slot, _rows.run, _rows.id)
    with store.reading() as connection:
        stored = connection.execute(query).all()
        kinds = run_mismatches(connection, run, list({owner for _, owner, *_ in stored}))
        drawn = _last_advantages(connection, run) if of_draws else {}
    allowed, candidates = bits(config.replay.allow_mismatch), []
    for id, owner, sampled_by, stored_with, sampling in stored:
        advantage = drawn.get(id) if of_draws else stored_with
        staleness = version - sampled_by if owner == run else None
        mismatch = (kinds[owner] | sampling) & ~allowed
        if mismatch:
            taken.leave_out(f"not comparable with the run's own: {', '.join(names_of(mismatch))}", id)
        elif staleness is not None and staleness < 0:
            taken.leave_out(f"sampled by a policy after {version}", id)
        elif advantage is None or not math.isfinite(advantage):
            taken.leave_out("no advantage is known: no update has used it" if of_draws else "no advantage is known", id)
        else:
            candidates.append(_Candidate(id, "replay", advantage, staleness, age_bucket(staleness)))
    return candidates


def _last_advantages(connection: sa.Connection, run: str) -> dict[str, float | None]:
    mine = (draws.c.run == run) & (draws.c.state == COMMITTED)
    query = sa.select(draws.c.trajectory, draws.c.advantage).where(mine).order_by(draws.c.iteration, draws.c.slot)
    return {row[0]: row[1] for row in connection.execute(query)}


def _of_iteration(store: ReplayStore, folder: RunFolder, asked: RowChoice, taken: Chosen) -> list[_Candidate]:
    """In the order of their slots, which is that of the update."""
    assert asked.iteration is not None
    fed = queries.iteration(store, folder.run_id, asked.iteration)["trajectories"]
    within = None
    if asked.filter is not None:
        with store.reading() as connection:
            within = set(connection.scalars(sa.select(_rows.id).where(chosen(None, asked.filter))))
    candidates = []
    for draw in fed:
        id, replayed = draw["trajectory"], draw["stream"] == REPLAY
        if within is not None and id not in within:
            continue
        if replayed and folder.config.replay.mode == "observe":
            taken.leave_out("only observed: it was in no loss", id)
        elif draw["advantage"] is None:
            taken.leave_out("no advantage is known", id)
        else:
            bucket = age_bucket(draw["staleness"]) if replayed else "fresh"
            candidates.append(_Candidate(id, draw["stream"], draw["advantage"], draw["staleness"], bucket))
    return candidates


def policy_of_iteration(store: ReplayStore, folder: RunFolder, iteration: int) -> int:
    """The version that the iteration's update started from."""
    version: int = queries.iteration(store, folder.run_id, iteration)["policy_version"]
    return version
