"""A buffer as a long run leaves it: tasks in groups, rewards and lengths that differ, and draws of its rows."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks._rows import RUN, make_trajectory
from context.messages import Message
from replay import ReplayStore, TaskRecord, Trajectory
from replay.questions.table_series import FLAT_GROUPS, GROUPS, TABLE_SERIES
from replay.records import FRESH, REPLAY, DrawRecord, HeldOutEpisode, group_of
from tests.fakes.records import add_run, iteration_record, measured, policy

FRESH_ROWS, REPLAYED, MEMBERS = 64, 32, 8
TASKS = [TaskRecord(f"{index * 0x9E3779B1 % 2**32:08x}", "lookup_chain", {"hops": index % 5}) for index in range(400)]
_OF_STREAMS = ("policy_loss", "ratio_mean", "ratio_max", "drift_mean", "ess", "clip_fraction", "approx_kl", "entropy")
_NEVER_LOGGED = {GROUPS, FLAT_GROUPS, "rollout/groups_all_failed", "rollout/groups_all_solved"}
LOGGED = sorted(
    TABLE_SERIES - _NEVER_LOGGED | {f"actor/{stream}/{name}" for stream in ("fresh", "replay") for name in _OF_STREAMS}
)
"""Metrics of an iteration, by names that a run logs."""
HELD_OUT, EVALUATIONS = 256, 10
_SHAPES = 200


def fill(store: ReplayStore, rows: int, random: np.random.Generator) -> None:
    """About as many rows as asked, four fifths of them of one run and the rest of another."""
    shapes = [_shape(random) for _ in range(_SHAPES)]
    for run, count in ((RUN, rows * 4 // 5), (f"{RUN}-2", rows // 5)):
        add_run(store, run)
        ids: list[str] = []
        for iteration in range(1, count // FRESH_ROWS + 1):
            fresh = _collected(run, iteration, shapes, random)
            groups = [group_of(fresh[first : first + MEMBERS]) for first in range(0, FRESH_ROWS, MEMBERS)]
            store.append(TASKS, groups, fresh)
            ages = random.exponential(2000, REPLAYED if ids else 0)  # the newest more often
            drawn = list(dict.fromkeys(ids[-1 - int(age) % len(ids)] for age in ages))
            own = [row.id for row in fresh]
            _update(store, run, iteration, [*own, *drawn], random)
            ids += own
        _evaluate(store, run, shapes, random)


def _update(store: ReplayStore, run: str, iteration: int, ids: Sequence[str], random: np.random.Generator) -> None:
    """`ids`: the iteration's own rows, then those drawn."""
    records = [
        DrawRecord(run, iteration, slot, id, REPLAY if slot >= FRESH_ROWS else FRESH, probability=None, staleness=0)
        for slot, id in enumerate(ids)
    ]
    store.reserve_fresh(records)
    done = iteration_record(
        iteration,
        run=run,
        planned_fresh=FRESH_ROWS,
        planned_replay=REPLAYED,
        fresh=FRESH_ROWS,
        replay=len(records) - FRESH_ROWS,
        metrics={name: float(random.random()) for name in LOGGED},
    )
    store.commit(done, measured(records), sampler_state={})
    store.add_policy(policy(iteration, run=run))


def _collected(run: str, iteration: int, shapes: Sequence[Trajectory], random: np.random.Generator) -> list[Trajectory]:
    rows: list[Trajectory] = []
    for first in range(0, FRESH_ROWS, MEMBERS):
        task, name = TASKS[int(random.integers(len(TASKS)))].hash, f"{run}-{iteration}-{first}"
        rewards = np.round(random.beta(0.6, 0.6, MEMBERS), 2)
        mean, std = float(rewards.mean()), float(rewards.std())
        for member, reward in enumerate(rewards.tolist()):
            shape = shapes[int(random.integers(len(shapes)))]
            record = replace(
                shape.record,
                id=f"{int(random.integers(2**63)):016x}",
                run=run,
                group=name,
                task=task,
                iteration=iteration,
                slot=first + member,
                member=member,
                reward=reward,
                success=reward >= 0.5,
                advantage=(reward - mean) / (std + 1e-6),
                mean_entropy=float(random.exponential(0.5)),
            )
            rows.append(replace(shape, record=record))
    return rows


def _evaluate(store: ReplayStore, run: str, shapes: Sequence[Trajectory], random: np.random.Generator) -> None:
    for iteration in range(100, 100 * (EVALUATIONS + 1), 100):
        episodes = []
        for number, task in enumerate(TASKS[:HELD_OUT]):
            shape = shapes[int(random.integers(len(shapes)))]
            success = bool(random.random() < iteration / 2000)
            episodes.append(
                HeldOutEpisode(
                    run=run,
                    iteration=iteration,
                    number=number,
                    task=task.hash,
                    environment="lookup_chain",
                    environment_version="1",
                    reward=float(success),
                    success=success,
                    stop_reason=shape.record.stop_reason,
                    error_kinds=None,
                    num_turns=shape.record.num_turns,
                    num_tool_calls=shape.record.num_tool_calls,
                    messages=shape.messages,
                )
            )
        store.keep_held_out(run, episodes, evaluations=EVALUATIONS)


def _shape(random: np.random.Generator) -> Trajectory:
    """What was said in an episode; many rows say the same."""
    turns = 1 + int(random.poisson(3))
    row = make_trajectory(random, iteration=1, slot=0, num_tokens=20 * turns + int(random.integers(60)))
    text = "".join(message.content for message in row.messages)
    messages = [Message("user", text[:80]), Message("assistant", text[80:], author="llm")]
    return replace(row, record=replace(row.record, num_turns=turns, num_tool_calls=turns - 1), messages=tuple(messages))
