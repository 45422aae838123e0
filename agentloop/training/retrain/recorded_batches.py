"""The batch of an iteration as the database recorded it: which rows, in which order, with which advantages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.runs.run_folder import RunFolder
from replay.queries.iteration import committed, fed
from replay.records import EVICTED, FRESH, BatchRow, DrawRecord, Trajectory
from replay.storage.read import Loaded, load
from replay.store import ReplayStore

_MOST_NAMED = 3


@dataclass(frozen=True)
class RecordedBatch:
    """What an update learned from."""

    iteration: int
    policy_version: int
    """The policy that the update began with."""
    rows: list[BatchRow]
    """In the order of their slots; without the replayed ones where those were only observed."""


def check_recorded(store: ReplayStore, folder: RunFolder, iterations: Sequence[int]) -> None:
    """Read every batch once, so that what is missing is known before anything is computed.

    Raises UserError for rows whose tokens are gone, and ReplayError for an iteration that was not committed.
    """
    lost: dict[str, list[int]] = defaultdict(list)
    for number in iterations:
        for words in _lost(store, folder, number):
            lost[words].append(number)
    if not lost:
        return
    named = [f"{words} in iteration {', '.join(map(str, used))}" for words, used in lost.items()]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    newest = max(number for used in lost.values() for number in used)
    raise UserError(
        f"rows that updates learned from must be stored with their tokens, got none of "
        f"{'; '.join(named[:_MOST_NAMED])}{more}. Retrain from a checkpoint of iteration {newest} or later."
    )


def recorded_batch(store: ReplayStore, folder: RunFolder, iteration: int) -> RecordedBatch:
    """One that was checked before: advantages and weights are those of the draws."""
    version, draws, loaded = _read(store, folder, iteration)
    rows = []
    for draw in draws:
        trajectory = loaded.whole[draw["trajectory"]]
        record = DrawRecord(
            folder.run_id,
            iteration,
            draw["slot"],
            trajectory.id,
            draw["stream"],
            draw["probability"],
            draw["staleness"],
            weight=draw["weight"],
        )
        advantage = _advantage(draw, trajectory, folder.config)
        rows.append(BatchRow(trajectory, record, advantage, trajectory.record.reward, record.weight))
    return RecordedBatch(iteration, version, rows)


def _read(store: ReplayStore, folder: RunFolder, iteration: int) -> tuple[int, list[dict[str, Any]], Loaded]:
    """The version that the update began with, its draws, and their rows."""
    config, run = folder.config, folder.run_id
    with store.reading() as connection:
        record = committed(connection, run, iteration)
        draws = fed(connection, run, first=iteration, last=iteration)
        if len(draws) != record["fresh"] + record["replay"]:
            raise UserError(
                f"draws of iteration {iteration} must be all there, got {len(draws)} of "
                f"{record['fresh'] + record['replay']}. See: agentloop replay verify"
            )
        if config.replay.mode == "observe":
            draws = [draw for draw in draws if draw["stream"] == FRESH]
        unknown = [draw["slot"] for draw in draws if draw["weight"] is None]
        if unknown:
            raise UserError(
                f"importance weights of iteration {iteration} must be stored, got none of slot {unknown[0]}. Retrain "
                "from a checkpoint after it."
            )
        ids = [draw["trajectory"] for draw in draws]
        # Messages are what an environment gives turns their rewards by.
        loaded = load(connection, ids, with_messages=config.advantage.credit == "turn")
        return record["policy_version"], draws, loaded


def _lost(store: ReplayStore, folder: RunFolder, iteration: int) -> list[str]:
    """The rows that are not there any more, by id, and why."""
    _, draws, loaded = _read(store, folder, iteration)
    reasons = loaded.reclaimed | loaded.corrupt | {id: gone.reason or EVICTED for id, gone in loaded.gone.items()}
    ids = [draw["trajectory"] for draw in draws]
    return [f"{id} ({reasons.get(id, 'unknown')})" for id in ids if id not in loaded.whole]


def _advantage(draw: Mapping[str, Any], trajectory: Trajectory, config: RunConfig) -> float:
    """What the update was given. With a critic the draw has what came out of it, and the update looks at none."""
    given = trajectory.record.advantage if config.algorithm == "ppo" else draw["advantage"]
    if given is None or not math.isfinite(given):
        raise UserError(
            f"advantages of iteration {draw['iteration']} must be stored, got none of slot {draw['slot']}. See: "
            "agentloop replay verify"
        )
    return float(given)
