"""A buffer as a long run leaves it: tasks in groups, rewards and lengths that differ, and every draw of every row."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from benchmarks._rows import RUN, add_run, make_tokens, make_trajectory
from context.authors import ENV, LLM, default_authors
from context.messages import Message, ToolCall
from context.tokens.token_sequence import Segment, TokenSequence
from replay import GroupRecord, IterationRecord, ReplayStore, TaskRecord, Trajectory
from replay.records import FRESH, REPLAY, DrawRecord
from tests.fakes.records import policy

FRESH_ROWS, REPLAYED, MEMBERS = 64, 32, 8
TASKS = [TaskRecord(f"{index * 0x9E3779B1 % 2**32:08x}", "lookup_chain", {"hops": index % 5}) for index in range(400)]
LONG = "f" * 16
"""Id of the one long trajectory."""
_TOOLS = ("lookup", "search", "calculator")
_METRICS = ("reward_mean", "success_rate", "pg_loss", "ratio_mean", "drift_mean", "ess", "clip_fraction", "staleness")
_SHAPES = 500
_APPENDED = 16
"""Iterations in one transaction."""


def fill(store: ReplayStore, rows: int, random: np.random.Generator) -> None:
    """About as many rows as asked, four fifths of them of one run and the rest of another."""
    shapes = [_shape(random) for _ in range(_SHAPES)]
    for run, count in ((RUN, rows * 4 // 5), (f"{RUN}-2", rows // 5)):
        add_run(store, run)
        ids: list[str] = []
        for first in range(1, count // FRESH_ROWS + 1, _APPENDED):
            iterations = range(first, first + _APPENDED)
            collected = [_collected(run, iteration, shapes, random) for iteration in iterations]
            trajectories = [row for _, rows in collected for row in rows]
            store.append(TASKS, [group for groups, _ in collected for group in groups], trajectories)
            for iteration, (_, fresh) in zip(iterations, collected, strict=True):
                own = [row.id for row in fresh]
                _update(store, run, iteration, [*own, *_drawn(ids, random)], random)
                ids += own


def add_workers(store: ReplayStore) -> None:
    """The first run as workers leave it: a ticket for every row, and 64 of them that are still there."""
    assert store.path is not None, "a file is needed"
    tickets = """insert into tickets (run, number, member, task, iteration, purpose, state, holder, fence, tries,
        trajectory, issued_at, ended_at, closed_at)
        select run, :groups * iteration + slot / :members, slot % :members, task, iteration, 'train',
        'done', 'worker-' || slot, 1, 1, id, iteration, iteration + 1, iteration - 1
        from trajectories where run = :run and slot < :groups * :members"""
    with closing(sqlite3.connect(store.path)) as connection, connection:
        connection.execute(tickets, {"run": RUN, "groups": FRESH_ROWS // MEMBERS, "members": MEMBERS})
    for number in range(FRESH_ROWS):
        facts = {"host": f"node-{number // 8}", "pid": number, "in_flight": 4, "done": 1000, "state": "working"}
        store.roles.report("worker", RUN, f"worker-{number}", facts)


def _drawn(ids: Sequence[str], random: np.random.Generator) -> list[str]:
    """The newest more often."""
    ages = random.exponential(2000, REPLAYED if ids else 0)
    return list(dict.fromkeys(ids[-1 - int(age) % len(ids)] for age in ages))


def _update(store: ReplayStore, run: str, iteration: int, ids: Sequence[str], random: np.random.Generator) -> None:
    """`ids`: the iteration's own rows, then those drawn."""
    records = [
        DrawRecord(run, iteration, slot, id, REPLAY if slot >= FRESH_ROWS else FRESH, probability=None, staleness=0)
        for slot, id in enumerate(ids)
    ]
    store.reserve_fresh(records)
    measured = [
        replace(
            record,
            advantage=0.5,
            drift_mean=float(random.normal(1.0, 0.1)),
            drift_max=float(random.normal(2.0, 0.1)),
            ess_share=1 / len(records),
            approx_kl=0.01,
            clip_fraction=0.05,
        )
        for record in records
    ]
    done = IterationRecord(
        run=run,
        iteration=iteration,
        policy_version=iteration - 1,
        planned_fresh=FRESH_ROWS,
        planned_replay=REPLAYED,
        fresh=FRESH_ROWS,
        replay=len(records) - FRESH_ROWS,
        fraction=1 / 3,
        optimizer_steps=2,
        metrics={f"{stream}/{name}": float(random.random()) for stream in ("fresh", "replay") for name in _METRICS},
    )
    store.commit(done, measured, sampler_state={})
    store.add_policy(policy(iteration, run=run))


def add_long(store: ReplayStore, *, turns: int = 500, turn_tokens: int = 200) -> None:
    """One trajectory of that many turns: half of each is the policy's, the rest its tool's answer."""
    random = np.random.default_rng(1)
    tokens, text = make_tokens(random, turns * turn_tokens)
    authors = default_authors()
    half = turn_tokens // 2
    codes = np.resize(np.repeat([authors.code(LLM), authors.code(ENV)], [half, turn_tokens - half]), len(tokens))
    segment = _as_written_by(tokens, codes.astype(np.uint8), random)
    step = len(text) // (2 * turns)
    messages: list[Message] = [Message("user", "Read it all.")]
    for turn in range(turns):
        said, answered = text[2 * turn * step :][:step], text[(2 * turn + 1) * step :][:step]
        call = ToolCall("search", {"query": said[:40]}, f"call-{turn}")
        messages.append(Message("assistant", said, author=LLM, tool_calls=(call,)))
        messages.append(Message("tool", answered, author=ENV, name="search", tool_call_id=call.id))
    group = GroupRecord("group-long", RUN, TASKS[0].hash, 1, 1, 1.0, 0.0, 1.0)
    row = make_trajectory(random, iteration=1, slot=FRESH_ROWS)
    record = replace(
        row.record,
        id=LONG,
        group=group.id,
        task=TASKS[0].hash,
        num_turns=turns,
        num_tool_calls=turns,
        reward=1.0,
        success=True,
        advantage=0.0,
    )
    store.append([TASKS[0]], [group], [Trajectory(record, (Segment(segment),), tuple(messages))])


def _collected(
    run: str, iteration: int, shapes: Sequence[Trajectory], random: np.random.Generator
) -> tuple[list[GroupRecord], list[Trajectory]]:
    groups: list[GroupRecord] = []
    rows: list[Trajectory] = []
    for first in range(0, FRESH_ROWS, MEMBERS):
        task = TASKS[int(random.integers(len(TASKS)))].hash
        name = f"{run}-{iteration}-{first}"
        graded = random.random() < 0.2
        rewards = np.round(random.beta(0.6, 0.6, MEMBERS), 2) if graded else random.integers(0, 2, MEMBERS) * 1.0
        mean, std = float(rewards.mean()), float(rewards.std())
        groups.append(GroupRecord(name, run, task, iteration, MEMBERS, mean, std, float((rewards >= 0.5).mean())))
        for member, reward in enumerate(rewards.tolist()):
            shape = shapes[int(random.integers(len(shapes)))]
            version = max(0, iteration - 1 - int(random.integers(2)))
            failed = random.random() < 0.03
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
                stop_reason="error" if failed else ("final", "max_turns")[int(random.random() < 0.2)],
                error_kind="timeout" if failed else None,
                mean_entropy=float(random.exponential(0.5)),
            )
            rows.append(replace(shape, record=record, segments=(_sampled_by(version, shape.segments[0].tokens),)))
    return groups, rows


def _sampled_by(version: int, tokens: TokenSequence) -> Segment:
    versions = np.where(tokens.policy_versions >= 0, version, -1).astype(np.int32)
    return Segment(replace(tokens, policy_versions=versions))


def _shape(random: np.random.Generator) -> Trajectory:
    """What was said in an episode; many rows say the same."""
    turns = 1 + int(random.poisson(3))
    row = make_trajectory(random, iteration=1, slot=0, num_tokens=20 * turns + int(random.integers(60)))
    tool = _TOOLS[int(random.integers(len(_TOOLS)))]
    text = "".join(message.content for message in row.messages)
    messages = [Message("user", text[:80])]
    for turn in range(turns - 1):
        call = ToolCall(tool, {"key": text[turn * 10 : turn * 10 + 8]}, f"call-{turn}")
        messages.append(Message("assistant", "", author=LLM, tool_calls=(call,)))
        messages.append(Message("tool", text[80 + turn * 60 :][:60], author=ENV, name=tool, tool_call_id=call.id))
    messages.append(Message("assistant", text[-40:], author=LLM))
    record = replace(row.record, num_turns=turns, num_tool_calls=turns - 1, environment="lookup_chain")
    return replace(row, record=record, messages=tuple(messages))


def _as_written_by(tokens: TokenSequence, codes: np.ndarray, random: np.random.Generator) -> TokenSequence:
    sampled = default_authors().is_action(codes)
    log_probs = np.where(sampled, -random.exponential(0.3, len(codes)), np.nan).astype(np.float32)
    return TokenSequence(tokens.token_ids, codes, log_probs, np.where(sampled, 0, -1).astype(np.int32))
