"""A small buffer with rows of every kind in every table, what its cells may become, and all that is asked of it then.

A cell is altered behind the back of the database's own rules: NOT NULL and references are out of force meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import sqlalchemy as sa
from starlette.types import ASGIApp, Message

from context.messages import Message as Said
from context.tokens.token_sequence import Segment
from replay import ReplayError, ReplayStore, queries
from replay.exchange import export_file
from replay.mixing.request import Limits
from replay.pages.app import create_app
from replay.queries.open_buffer import OpenBuffer
from replay.records import FRESH, REPLAY, HeldOutEpisode, Histogram, ObservationRecord, Trajectory
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location, open_database
from replay.storage.format.column_types import ExactText, Real, Truth, Whole
from replay.storage.format.encoding import content_hash
from replay.storage.format.ratio_histograms import count
from replay.storage.format.schema import metadata
from replay.storage.retention import Capacity
from replay.storage.write import Admission
from replay.ticket_records import PlannedBatch
from tests.fakes.records import (
    RUN,
    SHORT,
    FreshRows,
    group,
    iterate,
    new_store,
    policy,
    request,
    run_record,
    task,
    trajectory,
)
from tests.replay.pages.addresses import page_addresses
from tests.replay.storage.collecting.episodes import claim, collect, issue

OTHER = "run-2"
SWAPPED = "swapped"
"""A cell that holds what the column holds in another row."""

_FINGERPRINT = {"tokenizer": "tok", "template": "tpl", "model_family": "toy", "vocab_size": 99}
_IN_A_FILE: dict[str, dict[str, Any]] = {
    "text": {"null": None, "blob": b"\xff\x00", "empty": "", "other": "{[", "mark": "\ue000json:{", "long": "x" * 9000},
    "whole": {"null": None, "text": "abc", "blob": b"\1", "real": 0.5, "negative": -1, "huge": 2**62, "zero": 0},
    "real": {"null": None, "text": "abc", "blob": b"\1", "negative": -1.0, "huge": 1e308, "infinite": float("inf")},
    "truth": {"null": None, "text": "abc", "blob": b"\1", "huge": 2**62},
    "blob": {"null": None, "text": "abc", "empty": b"", "noise": b"AL\5\1\6\0\0\0noise", "number": 5},
}
_ON_A_SERVER: dict[str, dict[str, Any]] = {
    "text": {"null": None, "empty": "", "other": "{[", "mark": "\ue000json:{", "long": "x" * 2000},
    "whole": {"null": None, "negative": -1, "huge": 2**62, "zero": 0},
    "real": {"null": None, "negative": -1.0, "huge": 1e308, "infinite": float("inf"), "unknown": float("nan")},
    "truth": {"null": None},
    "blob": {"null": None, "empty": b"", "noise": b"AL\5\1\6\0\0\0noise"},
}
OBSERVED = ObservationRecord("call-1", "task-1", "tools-1", None, "look", {"n": 1}, "seen")
EVALUATED = HeldOutEpisode(
    RUN, 3, 0, "held-out", "tools", "1", 1.0, True, "answered", None, 1, 0, (Said("user", "7?"),)
)
_ROWS = {
    "runs": "id = 'run-1'",
    "policies": "run = 'run-1' and version = 3",
    "tasks": "hash = 'task-1'",
    "groups": "id = 'g-long'",
    "trajectories": "id = 'long'",
    "segments": "trajectory = 'long' and position = 1",
    "messages": "trajectory = 'long'",
    "draws": "stream = 'replay' and iteration = 3 and slot = 8",
    "iterations": "iteration = 3",
    "metrics": "iteration = 3 and name = 'actor/grad_norm'",
    "sampler_state": "iteration = 3",
    "token_scores": "position = 1",
    "histograms": "iteration = 3 and quantity = 'ratio'",
    "buffer_state": "name = 'changed'",
    "reclaimed": "id = '04738-run-1-1-0-0-0'",
    "tickets": "number = 0 and member = 0",
    "planned_batches": "iteration = 4",
    "workers": "id = 'first'",
    "engines": "id = 'first'",
    "observations": "id = 'call-1'",
    "held_out": "iteration = 3 and number = 1",
}
"""Whose cells are altered."""


@dataclass(frozen=True)
class Alteration:
    """One cell, and what becomes of it."""

    table: str
    column: str
    kind: str

    def __str__(self) -> str:
        return f"{self.table}.{self.column} {self.kind}"


def alterations(*, sqlite: bool) -> list[Alteration]:
    """Every column of every table, with everything it could hold instead."""
    values = _IN_A_FILE if sqlite else _ON_A_SERVER
    found = []
    for table in metadata.sorted_tables:
        for column in table.columns:
            kinds = [kind for kind in values[_kind(column)] if sqlite or kind != "null" or not column.primary_key]
            found += [Alteration(table.name, column.name, kind) for kind in [*kinds, SWAPPED]]
    return found


def _kind(column: sa.Column[Any]) -> str:
    kinds = {ExactText: "text", Truth: "truth", Whole: "whole", Real: "real"}
    return next((name for kind, name in kinds.items() if isinstance(column.type, kind)), "blob")


def fill(location: Location) -> None:
    """Two runs; iterations with draws, histograms, metrics and scores; rows of every state."""
    with closing(new_store(location)) as store:
        store.add_run(replace(run_record(OTHER), fingerprint=_FINGERPRINT))
        store.add_policy(replace(policy(0, run=OTHER), checkpoint="model/0"))
        other: dict[str, Any] = {"run": OTHER, "task": "task-2", "group": "g-other", "source": "teacher"}
        rows = [trajectory(f"other-{slot}", slot=slot, **other) for slot in range(2)]
        store.append([task("task-2")], [group("g-other", run=OTHER, task="task-2")], rows)
        spread = [Histogram("ratio", FRESH, "", count([0.0, 0.5])), Histogram("drift", REPLAY, "1", count([0.1]))]
        sampler = make_sampler("uniform", 0)
        for iteration in (1, 2, 3):
            iterate(store, iteration, sampler, histograms=spread)
        store.add_metrics(RUN, 3, {"eval/success": 0.5, "actor/replay/ess": 0.9})
        place: dict[str, Any] = {"group": "g-long", "iteration": 3}
        long = trajectory("long", segments=(Segment(SHORT), Segment(SHORT, "fork")), slot=8, **place)
        cut = trajectory("cut", slot=9, error_kind="limit", parent="long", **place)
        store.append([], [group("g-long", iteration=3)], [long, cut])
        given = trajectory("redacted", slot=10, **place)
        store.append([], [], [given], admission=Admission(redact=lambda said: said[:2]))
        FreshRows(4, attempt=1).append_to(store)
        # The first iteration's rows have no content any more, the second's still have it.
        store.evict(RUN, 3, policy_version=3, capacity=Capacity(age=1))
        store.purge(RUN, 3)
        store.evict(RUN, 4, policy_version=3, capacity=Capacity(age=1))
        store.resume(RUN, 3)
        issue(store, [0, 1], iteration=4)
        store.tickets.issue([], [], PlannedBatch(RUN, 4, {"share": 0.5}))
        collect(store, 1)
        store.tickets.fail(claim(store), "overtime")
        store.remember([OBSERVED])
        store.keep_held_out(RUN, [replace(EVALUATED, number=number) for number in (0, 1)], evaluations=1)
        for id in ("first", "second"):
            store.roles.report("worker", RUN, id, {"host": id})
            store.roles.report("engine", RUN, id, {"proved": 3})
        store.add_scores(RUN, 1, {("long", 0): np.zeros(6, np.float32), ("long", 1): np.ones(6, np.float32)})


def alter(location: Location, change: Alteration) -> bool:
    """False: the cell can't be altered so."""
    if isinstance(location, Path):
        with closing(sqlite3.connect(location, isolation_level=None)) as file:
            ((schema,),) = file.execute("select sql from sqlite_master where name = ?", (change.table,))
            _rewrite_schema(file, change.table, schema.replace(" NOT NULL", ""))
            with suppress(sqlite3.IntegrityError):
                return _altered(
                    lambda statement, *values: file.execute(statement, values).fetchall(), change, _IN_A_FILE
                )
            return False
    with suppress(psycopg.errors.UniqueViolation), psycopg.connect(location.replace("+psycopg", "")) as server:
        server.execute("set session_replication_role = replica")
        if change.kind == "null":
            server.execute(f"alter table {change.table} alter column {change.column} drop not null")

        def ask(statement: str, *values: Any) -> list[tuple[Any, ...]]:
            answer = server.execute(statement.replace("?", "%s"), values)
            return answer.fetchall() if answer.description else []

        return _altered(ask, change, _ON_A_SERVER)
    return False


def _rewrite_schema(file: sqlite3.Connection, table: str, schema: str) -> None:
    file.execute("pragma writable_schema = on")
    file.execute("update sqlite_master set sql = ? where name = ?", (schema, table))
    file.execute("pragma writable_schema = reset")


def _altered(ask: Callable[..., list[tuple[Any, ...]]], change: Alteration, values: dict[str, dict[str, Any]]) -> bool:
    table, name, where = change.table, change.column, _ROWS[change.table]
    ((before,),) = ask(f"select {name} from {table} where {where}")
    if change.kind == SWAPPED:
        others = ask(f"select {name} from {table} where not ({where}) and {name} <> ? limit 1", before)
    else:
        column = next(column for column in metadata.tables[table].columns if column.name == name)
        others = [(values[_kind(column)][change.kind],)]
    if not others or others == [(before,)]:
        return False
    ask(f"update {table} set {name} = ? where {where}", others[0][0])
    return True


@dataclass(frozen=True)
class Outcome:
    raw: dict[str, BaseException]
    """What was raised that is not the project's own error, or has more than one line; by what was asked."""
    different: list[str]
    """Trajectories that were drawn, read or exported otherwise than they were written."""
    refused: dict[str, str]
    """One-line errors by what was asked."""
    quarantined: list[str]
    found: bool
    """Whether `verify` told of anything."""

    @property
    def kind(self) -> str:
        if self.raw or self.different:
            return "raw" if self.raw else "different"
        return "quarantined" if self.quarantined else "refused" if self.refused else "told" if self.found else "same"


class Asked:
    """What is asked of a buffer, again and again, while others take its place."""

    def __init__(self, location: Location, folder: Path) -> None:
        """The buffer is whole now."""
        self._location = location
        self._folder = folder
        self._looking = ReplayStore.open(location, read_only=True)
        self._app = create_app(OpenBuffer(self._looking))
        self._database = open_database(location, read_only=False)
        store = ReplayStore(self._database)
        with store.reading() as connection:
            query = sa.text("select id from trajectories where state not in ('evicted', 'orphaned') order by id")
            self.ids = list(connection.scalars(query))
        self._rows = {row.id: row for row in store.read(self.ids)}
        self.close()

    def close(self) -> None:
        """Others may take the buffer's place."""
        self._looking.close()
        self._database.close()

    def again(self, sampled: random.Random | None = None) -> Outcome:
        """Everything is asked; or a draw, `verify` and some of the rest."""

        def some(names: Sequence[str], number: int) -> Sequence[str]:
            return names if sampled is None else sampled.sample(names, number)

        raw: dict[str, BaseException] = {}
        refused: dict[str, str] = {}

        def ask(name: str, question: Callable[[], Any]) -> Any:
            try:
                return question()
            except ReplayError as error:
                refused[name] = str(error)
                if "\n" in str(error):
                    raw[name] = error
            except Exception as error:  # noqa: BLE001  whatever is raised is what is looked for
                raw[name] = error
            return None

        target = self._folder / "exported.jsonl"
        questions: dict[str, Callable[[ReplayStore], Any]] = {**_QUESTIONS}
        questions["export"] = lambda store: export_file(store, target, force=True)
        for name in some(list(questions), 2):
            ask(name, lambda: questions[name](self._looking))  # noqa: B023  asked at once
        raw |= _failures(self._app, some(PAGES, 1))
        ask("open", lambda: ReplayStore.open(self._location).close())
        quarantined: list[str] = []
        # As a trainer that was started anew: nothing of earlier draws is in memory.
        store = ReplayStore(self._database)
        with closing(self):
            rows = ask("draw", lambda: _drawn(store)) or []
            for id in some(self.ids, 2):
                rows += ask(f"read {id}", lambda: store.read([id])) or []  # noqa: B023
            verified = ask("verify", lambda: store.verify())
            if verified is not None:
                ask("quarantine", lambda: store.quarantine(verified.corrupt))
                # What verify names is no reason to stop any more.
                rows += ask("draw again", lambda: _drawn(store)) or []
            quarantined += ask("quarantined", lambda: _quarantined(store)) or []
        different = sorted({row.id for row in rows if not self._is_as_written(row)})
        found = verified is not None and bool(verified.corrupt or verified.damage or verified.dangling)
        return Outcome(raw, different, refused, quarantined, found)

    def _is_as_written(self, row: Trajectory) -> bool:
        """Drawn rows have no messages."""
        written = self._rows.get(row.id)
        if written is None or replace(row.record, state="") != replace(written.record, state=""):
            return False
        return content_hash(row.segments) == content_hash(written.segments) and row.messages in ((), written.messages)


def _quarantined(store: ReplayStore) -> list[str]:
    with store.reading() as connection:
        return list(map(str, connection.scalars(sa.text("select id from trajectories where state = 'quarantined'"))))


def _drawn(store: ReplayStore) -> list[Trajectory]:
    limits = Limits(max_uses=9, cooldown=1, max_staleness=99, retire_solved=1.0)
    wanted = replace(request(5, 30), limits=limits)
    return [row.trajectory for row in store.draw(wanted, make_sampler("success", 0))]


def _remembered(store: ReplayStore) -> None:
    """What was altered is not believed."""
    assert all(found == OBSERVED for found in store.remembered(OBSERVED.environment, [OBSERVED.task]))


_QUESTIONS: dict[str, Callable[[ReplayStore], Any]] = {
    "summary": lambda store: queries.summary(store, RUN),
    "page": lambda store: queries.page(store),
    "distributions": lambda store: queries.distributions(store, queries.Query()),
    "iteration": lambda store: queries.iteration(store, RUN, 3),
    "runs": lambda store: queries.runs(store),
    "progress": lambda store: queries.progress(store, store.run(RUN)),
    "series": lambda store: queries.metric_series(store, RUN),
    "task": lambda store: queries.task(store, "task-1"),
    "trajectory": lambda store: queries.trajectory(store, "long"),
    "overview": lambda store: queries.overview(store, "long"),
    "tokens": lambda store: queries.tokens(store, "long", 1),
    "tickets": lambda store: store.tickets.counts(RUN),
    "ended groups": lambda store: store.tickets.ended_groups(RUN),
    "planned batches": lambda store: store.tickets.planned(RUN, after=0),
    "ended run": lambda store: store.roles.view(RUN).has_ended,
    "workers": lambda store: store.roles.listed("worker", RUN),
    "engines": lambda store: store.roles.listed("engine", RUN),
    "observations": _remembered,
    "held-out": lambda store: queries.held_out(store, RUN),
    "held-out task": lambda store: queries.held_out_task(store, RUN, "held-out"),
}


PAGES = page_addresses((RUN, OTHER), "task-1", ("long", "cut", "redacted"), held_out="held-out")


def _failures(app: ASGIApp, pages: Sequence[str]) -> dict[str, BaseException]:
    """By page."""

    async def asked() -> dict[str, BaseException]:
        found: dict[str, BaseException] = {}
        for page in pages:
            try:
                await _answered(app, page)
            except Exception as error:  # noqa: BLE001  whatever is raised is what is looked for
                found[page] = error
        return found

    return asyncio.run(asked())


async def _answered(app: ASGIApp, target: str) -> None:
    """As a server would ask; raises what the app raises."""
    path, _, query = target.partition("?")

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        pass

    ends = {"server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "headers": [(b"host", b"127.0.0.1:1")]}
    asked = {"method": "GET", "path": path, "raw_path": path.encode(), "query_string": query.encode()}
    fixed = {"type": "http", "http_version": "1.1", "scheme": "http", "root_path": "", "asgi": {"version": "3.0"}}
    await app(fixed | ends | asked, receive, send)
