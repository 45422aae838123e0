"""Experience made up by hand: small, complete, and different for every id."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

from context.authors import ENV, LLM, TEMPLATE, USER, default_authors
from context.messages import Message, ToolCall
from context.tokens.session_nodes import Node
from context.tokens.session_segments import segments_of
from context.tokens.token_sequence import Segment, TokenSequence
from replay import ReplayStore
from replay.mixing.request import DrawRequest, Limits, Pick
from replay.records import (
    FRESH,
    BatchRow,
    DrawRecord,
    GroupRecord,
    IterationRecord,
    PolicyRecord,
    RunRecord,
    TaskRecord,
    Trajectory,
    TrajectoryRecord,
)
from replay.sampling.samplers import Sampler, make_sampler
from replay.storage.collecting.ticket_records import TicketCounts
from replay.storage.collecting.tickets import count_tickets
from replay.storage.databases import Location
from replay.storage.write import AppendReport, Redactor
from tests.fakes.random_agents import planned_session, random_session

AUTHORS = default_authors()
RUN = "run-1"


def a_run(id: str = RUN) -> RunRecord:
    return RunRecord(id, "quickstart-001", {"run": {"seed": 0}}, AUTHORS.to_json(), AUTHORS.hash, "0.1.0")


def policy(version: int, *, run: str = RUN, tokenizer: str = "tok") -> PolicyRecord:
    return PolicyRecord(run, version, checkpoint=None, tokenizer_hash=tokenizer, template_hash="tpl")


@cache
def _empty_file() -> bytes:
    """A database without a row: to migrate each one from nothing takes longer than most tests."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.sqlite"
        ReplayStore.create(path).close()
        return path.read_bytes()


def new_store(location: Location, run: str = RUN) -> ReplayStore:
    if isinstance(location, Path) and not location.exists():
        location.touch(mode=0o600)
        location.write_bytes(_empty_file())
    return add_run(ReplayStore.create(location), run)


def add_run(store: ReplayStore, run: str = RUN, *, tokenizer: str = "tok") -> ReplayStore:
    """A run and its first policy, which rows refer to."""
    store.add_run(a_run(run))
    store.add_policy(policy(0, run=run, tokenizer=tokenizer))
    return store


def sql(where: Location | ReplayStore, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """What the plain driver answers, sqlite3 or psycopg; committed. Parameters are question marks."""
    location = (where.path or where.url) if isinstance(where, ReplayStore) else where
    if isinstance(location, Path):
        with closing(sqlite3.connect(location)) as connection, connection:
            return connection.execute(statement, parameters).fetchall()
    with psycopg.connect(location.replace("+psycopg", "")) as server:
        query = statement.replace("%", "%%").replace("?", "%s")
        answer = server.execute(query, parameters)  # type: ignore[call-overload]  # tests write it themselves
        return answer.fetchall() if answer.description else []


def set_state(store: ReplayStore, id: str, state: str) -> None:
    """As another process would."""
    sql(store, "update buffer_state set value = value + 1 where name = 'changed'")
    newest = "(select value from buffer_state where name = 'changed')"
    sql(store, f"update trajectories set state = ?, changed = {newest} where id = ?", state, id)


def tokens(ids: list[int], authors: list[str], *, version: int = 0, log_prob: float = -0.5) -> TokenSequence:
    """Sampled tokens have log-probs log_prob, 2 log_prob, ... in turn."""
    codes = np.array([AUTHORS.code(name) for name in authors], np.uint8)
    action = AUTHORS.has_behavior(codes)
    log_probs = np.where(action, log_prob * np.cumsum(action), np.nan).astype(np.float32)
    return TokenSequence(np.array(ids, np.int32), codes, log_probs, np.where(action, version, -1).astype(np.int32))


SHORT = tokens([5, 6, 7, 8, 9, 10], [TEMPLATE, USER, LLM, LLM, ENV, LLM])


MESSAGES = (
    Message("system", "You look things up.", author="initialization"),
    Message("user", "Where is the key?"),
    Message("assistant", "", author="llm", tool_calls=(ToolCall("lookup", {"key": "k1"}, "call-0"),), reasoning="k1"),
    Message(
        "tool", "line one\nNUL \x00, half \ud83d, mark \ue000json:x", author="env", name="lookup", tool_call_id="call-0"
    ),
    Message("assistant", "in the drawer", author="llm"),
)


def trajectory(
    id: str, *, segments: tuple[Segment, ...] = (Segment(SHORT),), messages: tuple[Message, ...] = MESSAGES, **new: Any
) -> Trajectory:
    place: dict[str, Any] = {"run": RUN, "group": "group-1", "task": "task-1", "iteration": 1, "slot": 0, "member": 0}
    outcome: dict[str, Any] = {"reward": 1.0, "success": True, "advantage": 0.5, "stop_reason": "final"}
    counts: dict[str, Any] = {"num_turns": 2, "num_tool_calls": 1, "environment": "lookup_chain"}
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "full"}
    given = {**place, **outcome, **counts, **sampling, "mean_entropy": 0.25, "environment_version": "1"}
    record = TrajectoryRecord(id=id, **given)
    return Trajectory(replace(record, **new), segments, messages)


def planned_row(id: str, **changes: Any) -> Trajectory:
    """The row of a session with every kind of request, behind which its program says `done`."""
    ending = Message("tool", "done", author=ENV, name="agent")
    row = session_row(id, nodes=planned_session(), **changes)
    return replace(row, messages=(*row.messages, ending))


def session_row(id: str, seed: int = 5, *, nodes: Sequence[Node] | None = None, **changes: Any) -> Trajectory:
    """The row of an agent's session, by default one of a random agent."""
    nodes = tuple(random_session(seed).tree.nodes if nodes is None else nodes)
    said = tuple(message for node in nodes for message in node.messages)
    changes = {"num_turns": sum(bool(node.num_sampled) for node in nodes), **changes}
    given = trajectory(id, segments=segments_of(nodes, AUTHORS), messages=said, source="gateway", **changes)
    return replace(given, nodes=nodes)


def group(id: str = "group-1", **changes: Any) -> GroupRecord:
    record = GroupRecord(id, RUN, "task-1", iteration=1, size=2, reward_mean=0.5, reward_std=0.5, success_rate=0.5)
    return replace(record, **changes)


def task(hash: str = "task-1") -> TaskRecord:
    return TaskRecord(hash, "lookup_chain", {"hops": 2, "store": {"k1": "drawer"}})


def put(store: ReplayStore, *rows: Trajectory, redact: Redactor | None = None, **changes: Any) -> AppendReport:
    """Rows, with their tasks and their groups; `changes`: of every group."""
    groups: dict[str, GroupRecord] = {}
    for at in (row.record for row in rows):
        groups.setdefault(at.group, group(at.group, run=at.run, task=at.task, iteration=at.iteration, **changes))
    tasks = [task(hash) for hash in {each.task: None for each in groups.values()}]
    return store.append(tasks, [*groups.values()], rows, redact=redact)


@dataclass
class Fresh:
    """The fresh rows of one iteration, in groups of `rates`: a member of a group is a success with its rate."""

    iteration: int
    rates: tuple[float, ...] = (0.5,)
    size: int = 4
    attempt: int = 0
    run: str = RUN
    source: str = "self"
    version: int | None = None
    trajectories: list[Trajectory] = field(default_factory=list)
    groups: list[GroupRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        version = self.iteration - 1 if self.version is None else self.version
        segments = (Segment(tokens([5, 6, 7, 8, 9, 10], [TEMPLATE, USER, LLM, LLM, ENV, LLM], version=version)),)
        for index, rate in enumerate(self.rates):
            name = f"{self.run}-{self.iteration}-{self.attempt}-{index}"
            place = {"run": self.run, "iteration": self.iteration}
            self.groups.append(group(name, size=self.size, success_rate=rate, **place))
            for member in range(self.size):
                slot, success = len(self.trajectories), member < round(rate * self.size)
                # Ids in an order of their own: selection must not follow them.
                id = f"{(slot * 7919 + self.iteration * 104729) * (2 * self.attempt + 1) % 99991:05d}-{name}-{member}"
                origin: dict[str, Any] = {"attempt": self.attempt, "source": self.source, **place}
                made = trajectory(id, segments=segments, group=name, slot=slot, member=member, **origin)
                record = replace(made.record, success=success, reward=float(success))
                self.trajectories.append(replace(made, record=record))

    def append_to(self, store: ReplayStore) -> Fresh:
        store.append([task()], self.groups, self.trajectories)
        return self

    def draws(self) -> list[DrawRecord]:
        """All of them in the batch of their own iteration, in their order."""
        return fresh_draws(self.trajectories, iteration=self.iteration)


def fresh_draws(rows: Sequence[Trajectory], *, iteration: int) -> list[DrawRecord]:
    return [
        DrawRecord(row.record.run, iteration, slot, row.id, FRESH, probability=None, staleness=0)
        for slot, row in enumerate(rows)
    ]


def measured(draws: Sequence[DrawRecord]) -> list[DrawRecord]:
    """The same with the statistics of an update."""
    update = {"advantage": 0.5, "drift_mean": 1.1, "token_gap_max": 1.5}
    shares = {"ess_share": 0.1, "approx_kl": 0.01, "clip_fraction": 0.0}
    return [replace(draw, **update, **shares) for draw in draws]


def request(iteration: int, count: int, *, successful_only: bool = False, run: str = RUN) -> DrawRequest:
    limits = Limits(successful_only=successful_only)
    return DrawRequest(run, iteration, iteration - 1, (Pick(count),), first_slot=8, limits=limits)


def draw(store: ReplayStore, iteration: int, count: int, sampler: str = "uniform") -> list[BatchRow]:
    return store.draw(request(iteration, count), make_sampler(sampler, 0))


def iterate(
    store: ReplayStore,
    iteration: int,
    sampler: Sampler | None = None,
    *,
    count: int = 2,
    attempt: int = 0,
    limits: Limits | None = None,
) -> list[str]:
    """One whole iteration of a make-believe loop; the ids drawn."""
    sampler = sampler or make_sampler("uniform", 0)
    fresh = Fresh(iteration, rates=(0.5, 0.25), attempt=attempt).append_to(store).draws()
    store.reserve_fresh(fresh)
    drawn = store.draw(replace(request(iteration, count), limits=limits or Limits(successful_only=False)), sampler)
    record = iteration_record(iteration, replay=len(drawn))
    store.commit(record, measured([*fresh, *(row.draw for row in drawn)]), sampler_state=sampler.state())
    store.add_policy(policy(iteration))
    return [row.trajectory.id for row in drawn]


def iterated(location: Location, iterations: int = 3, *, sampler: str = "uniform", count: int = 2) -> ReplayStore:
    """A new store after some iterations: 8 fresh rows in each, 2 + 1 of them successes, and `count` drawn."""
    store, chooser = new_store(location), make_sampler(sampler, 3)
    for iteration in range(1, iterations + 1):
        iterate(store, iteration, chooser, count=count)
    return store


def iteration_record(iteration: int, *, replay: int, **changes: Any) -> IterationRecord:
    metrics = {"actor/grad_norm": iteration / 2}
    record = IterationRecord(RUN, iteration, iteration - 1, 8, 2, 8, replay, 0.2, optimizer_steps=2, metrics=metrics)
    return replace(record, **changes)


def add_draw(
    store: ReplayStore,
    id: str,
    *,
    run: str = RUN,
    iteration: int = 1,
    slot: int = 0,
    mean: float | None = None,
    largest: float | None = None,
    **kind: str,
) -> None:
    """A draw of a row, committed and replayed where `kind` says nothing else, with its mean drift and largest gap."""
    names = {"stream": "replay", "state": "committed", **kind}
    statement = (
        "insert into draws (run, iteration, slot, trajectory, stream, state, drift_mean, token_gap_max) "
        "values (?, ?, ?, ?, ?, ?, ?, ?)"
    )
    sql(store, statement, run, iteration, slot, id, names["stream"], names["state"], mean, largest)


def ticket_counts(store: ReplayStore, run: str = RUN) -> TicketCounts:
    with store.reading() as connection:
        return count_tickets(connection, run)
