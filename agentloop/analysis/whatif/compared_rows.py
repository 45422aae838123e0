"""Which stored rows `replay whatif` looks at, and in which role."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from agentloop.config import RunConfig
from agentloop.runs.run_folder import RunFolder
from replay import questions
from replay.questions import chosen
from replay.records import COMMITTED, ELIGIBLE, FRESH, REPLAY, BatchRow, DrawRecord, age_bucket
from replay.sampling.compatibility import bits, names_of, run_mismatches, sampling_mismatch
from replay.storage.format.schema import draws, trajectories
from replay.storage.read import load
from replay.store import ReplayStore

_rows = trajectories.c
LeftOutIds = defaultdict[str, list[str]]
"""Ids by the reason why they are left out."""


@dataclass(frozen=True)
class RowChoice:
    """Which rows, as the command line says it."""

    filter: str | None = None
    limit: int | None = None
    """Most rows of the buffer."""
    iteration: int | None = None
    """The batch of this iteration instead of the buffer, whole and as it was."""

    def in_words(self) -> str:
        where = "" if self.filter is None else f" where {self.filter}"
        if self.iteration is not None:
            return f"the batch of iteration {self.iteration}{where}"
        return f"stored rows{where}, as replayed"


def bucket_of(row: BatchRow) -> str:
    """The part of the rows that it is counted in."""
    return FRESH if row.stream == FRESH else age_bucket(row.staleness)


def buckets_of(rows: Sequence[BatchRow]) -> list[str]:
    """Fresh rows of an iteration first, then by age, the unknown one last."""
    ordered = sorted(rows, key=lambda row: (row.stream == REPLAY, row.staleness is None, row.staleness or 0))
    return list(dict.fromkeys(map(bucket_of, ordered)))


def advantages_in_words(config: RunConfig, asked: RowChoice) -> str:
    if asked.iteration is not None:
        return f"those of iteration {asked.iteration}"
    if _made_in_the_batch(config):
        return "those of the last update that used the row"
    return "those the row was collected with"


def _made_in_the_batch(config: RunConfig) -> bool:
    """True: an advantage depends on what else is in the batch, so the one it was collected with is not trained."""
    return config.algorithm == "ppo" or config.replay.baseline != "stored" or config.advantage.normalise_batch != "none"


def choose_rows(
    store: ReplayStore, folder: RunFolder, version: int, asked: RowChoice
) -> tuple[list[BatchRow], int, dict[str, tuple[str, ...]]]:
    """Rows that the policy `version` of the run could have been given, read whole; how many there were to choose from,
    and the ids of those that were left out, by the reason why.

    More than the limit are thinned evenly in the order of (iteration, slot), so that every age stays.
    """
    left_out = LeftOutIds(list)
    if asked.iteration is None:
        draws = _of_buffer(store, folder, version, asked.filter, left_out)
    else:
        draws = list(_of_iteration(store, folder, asked.iteration, asked.filter, left_out))
    found = len(draws)
    if asked.iteration is None and asked.limit is not None and found > asked.limit:
        draws = [draws[place * found // asked.limit] for place in range(asked.limit)]
    with store.reading() as connection:
        loaded = load(connection, [draw.trajectory for draw in draws], with_messages=False)
    rows = []
    for draw in draws:
        if draw.trajectory in loaded.whole:
            row = BatchRow(loaded.whole[draw.trajectory], draw, advantage=draw.advantage or 0.0, weight=draw.weight)
            rows.append(row)
        elif draw.trajectory in loaded.corrupt:
            left_out["corrupt: agentloop replay verify says why"].append(draw.trajectory)
        else:
            left_out["its tokens are gone"].append(draw.trajectory)
    return rows, found, {why: tuple(ids) for why, ids in left_out.items()}


def _of_buffer(
    store: ReplayStore, folder: RunFolder, version: int, filter: str | None, left_out: LeftOutIds
) -> list[DrawRecord]:
    config, run = folder.config, folder.run_id
    of_draws = _made_in_the_batch(config)
    wanted = [chosen(None, filter), _rows.state == ELIGIBLE, _rows.num_action_tokens > 0, _rows.temperature > 0]
    columns = (_rows.id, _rows.run, _rows.policy_version_min, _rows.advantage, sampling_mismatch(_rows))
    query = sa.select(*columns).where(*wanted).order_by(_rows.iteration, _rows.slot, _rows.run, _rows.id)
    with store.reading() as connection:
        stored = connection.execute(query).all()
        kinds = run_mismatches(connection, run, list({owner for _, owner, *_ in stored}))
        drawn = _last_advantages(connection, run) if of_draws else {}
    allowed, found = bits(config.replay.allow_mismatch), list[DrawRecord]()
    for id, owner, sampled_by, collected_with, sampling in stored:
        advantage = drawn.get(id) if of_draws else collected_with
        staleness = version - sampled_by if owner == run else None
        mismatch = (kinds[owner] | sampling) & ~allowed
        if mismatch:
            left_out[f"not comparable with the run's own: {', '.join(names_of(mismatch))}"].append(id)
        elif staleness is not None and staleness < 0:
            left_out[f"sampled by a policy after {version}"].append(id)
        elif advantage is None or not math.isfinite(advantage):
            left_out["no advantage is known" + (": no update has used it" if of_draws else "")].append(id)
        else:
            found.append(DrawRecord(run, 0, len(found), id, REPLAY, None, staleness, advantage=advantage))
    return found


def _last_advantages(connection: sa.Connection, run: str) -> dict[str, float | None]:
    mine = (draws.c.run == run) & (draws.c.state == COMMITTED)
    query = sa.select(draws.c.trajectory, draws.c.advantage).where(mine).order_by(draws.c.iteration, draws.c.slot)
    return {row[0]: row[1] for row in connection.execute(query)}


def _of_iteration(
    store: ReplayStore, folder: RunFolder, iteration: int, filter: str | None, left_out: LeftOutIds
) -> Iterator[DrawRecord]:
    """In the order of their slots, which is that of the update."""
    run, replay = folder.run_id, folder.config.replay
    with store.reading() as connection:
        within = set(connection.scalars(sa.select(_rows.id).where(chosen(None, filter))))
    for fed in questions.iteration(store, run, iteration)["trajectories"]:
        id, stream, advantage = fed["trajectory"], fed["stream"], fed["advantage"]
        if filter is not None and id not in within:
            continue
        if stream == REPLAY and replay.mode == "observe":
            left_out["only observed: it was in no loss"].append(id)
        elif advantage is None:
            left_out["no advantage is known"].append(id)
        elif fed["weight"] is None:
            left_out["no importance weight is known"].append(id)
        else:
            weight, age = fed["weight"], fed["staleness"]
            yield DrawRecord(run, iteration, fed["slot"], id, stream, None, age, advantage=advantage, weight=weight)
