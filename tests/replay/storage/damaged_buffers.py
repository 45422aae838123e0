"""A small file with rows of every kind in every table, and all that is asked of it once it is damaged."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
from starlette.testclient import TestClient

from context.messages import Message as Said
from context.tokens.token_sequence import Segment
from replay import ReplayError, ReplayStore, questions
from replay.exchange import export_file
from replay.mixing.request import Limits
from replay.pages.app import create_app
from replay.questions.open_buffer import OpenBuffer
from replay.records import HeldOutEpisode, ObservationRecord, Trajectory
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location, open_database
from replay.storage.format.encoding import content_hash
from replay.storage.retention import Capacity
from replay.storage.sessions import OpenSession
from replay.ticket_records import PlannedBatch
from tests.fakes.random_agents import TODAY
from tests.fakes.records import (
    RUN,
    SHORT,
    FreshRows,
    iterate,
    new_store,
    policy,
    put,
    request,
    run_record,
    session_row,
    sql,
    trajectory,
)
from tests.replay.pages.serving import page_addresses
from tests.replay.storage.collecting.episodes import claim, collect, issue

OTHER = "run-2"

_FINGERPRINT = {"tokenizer": "tok", "template": "tpl", "model_family": "toy", "vocab_size": 99}
OBSERVED = ObservationRecord("call-1", "task-1", "tools-1", None, "look", {"n": 1}, "seen")
EVALUATED = HeldOutEpisode(
    RUN, 3, 0, "held-out", "tools", "1", 1.0, True, "answered", None, 1, 0, (Said("user", "7?"),)
)


def fill(location: Location) -> None:
    with closing(new_store(location)) as store:
        store.add_run(replace(run_record(OTHER), fingerprint=_FINGERPRINT))
        store.add_policy(replace(policy(0, run=OTHER), checkpoint="model/0"))
        other: dict[str, Any] = {"run": OTHER, "task": "task-2", "group": "g-other", "source": "teacher"}
        rows = [trajectory(f"other-{slot}", slot=slot, **other) for slot in range(2)]
        put(store, *rows)
        sampler = make_sampler("uniform", 0)
        for iteration in (1, 2, 3):
            iterate(store, iteration, sampler)
        store.add_metrics(RUN, 3, {"eval/success": 0.5, "actor/replay/ess": 0.9})
        place: dict[str, Any] = {"group": "g-long", "iteration": 3}
        long = trajectory("long", segments=(Segment(SHORT), Segment(SHORT, "fork")), slot=8, **place)
        cut = trajectory("cut", slot=9, error_kinds="limit", parent="long", **place)
        put(store, long, cut)
        agent = session_row("agent", slot=11, **place)
        store.append([], [], [agent])
        store.sessions.open(OpenSession("under way", RUN, TODAY.isoformat()))
        store.sessions.add([("under way", node) for node in agent.nodes])
        given = trajectory("redacted", slot=10, **place)
        store.append([], [], [given], redact=lambda said: said[:2])
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


def buffer_with_log(folder: Path) -> tuple[bytes, bytes]:
    path = folder / "replay.sqlite"
    fill(path)
    with closing(ReplayStore.open(path)) as store:
        sql(path, "pragma wal_checkpoint(truncate)")
        FreshRows(4, attempt=2).append_to(store)
        return path.read_bytes(), path.with_name("replay.sqlite-wal").read_bytes()


def place(path: Path, file: bytes, log: bytes | None) -> None:
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()
    path.write_bytes(file)
    if log is not None:
        path.with_name(f"{path.name}-wal").write_bytes(log)


class Asked:
    """What is asked of a buffer, again and again, while others take its place."""

    def __init__(self, path: Path) -> None:
        """The buffer is whole now."""
        self._path = path
        self._looking = ReplayStore.open(path, read_only=True)
        self._pages = TestClient(create_app(OpenBuffer(self._looking)), base_url="http://127.0.0.1:1")
        self._database = open_database(path, read_only=False)
        query = "select id from trajectories where state not in ('evicted', 'orphaned') order by id"
        self.ids = [str(id) for (id,) in sql(path, query)]
        self._rows = {row.id: row for row in ReplayStore(self._database).read(self.ids)}
        self.close()

    def close(self) -> None:
        """Others may take the buffer's place."""
        self._looking.close()
        self._database.close()

    def again(self, chance: random.Random) -> tuple[bool, list[str]]:
        """A draw, `verify` and some questions: whether the damage was noticed, and what is wrong.

        Wrong is what was raised that is not the project's own error, or has more than one line, or was refused though
        `verify` finds nothing; and rows that were drawn or read otherwise than they were written.
        """
        wrong: list[str] = []
        refused: list[str] = []

        def ask(name: str, question: Callable[[], Any]) -> Any:
            try:
                return question()
            except ReplayError as error:
                refused.append(str(error))
                wrong.extend([f"{name}: {error!r}"] if "\n" in str(error) else [])
            except Exception as error:  # noqa: BLE001  whatever is raised is what is looked for
                wrong.append(f"{name}: {error!r}")
            return None

        exported = self._path.with_name("exported.jsonl")
        questions = {**QUESTIONS, "export": lambda store: export_file(store, exported, force=True)}
        for name in chance.sample(list(questions), 2):
            ask(name, lambda: questions[name](self._looking))  # noqa: B023  asked at once
        page = chance.choice(PAGES)
        ask(page, lambda: self._pages.get(page))  # raises what the app raises
        ask("open", lambda: ReplayStore.open(self._path).close())
        # As a trainer that has just been started: nothing of earlier draws is in memory.
        store = ReplayStore(self._database)
        with closing(self):
            rows = ask("draw", lambda: _drawn(store)) or []
            for id in chance.sample(self.ids, 2):
                rows += ask(f"read {id}", lambda: store.read([id])) or []  # noqa: B023
            verified = ask("verify", store.verify)
            if verified is not None:
                ask("quarantine", lambda: store.quarantine(verified.corrupt))
                # What verify names is no reason to stop any more.
                rows += ask("draw again", lambda: _drawn(store)) or []
            quarantined = ask("quarantined", lambda: _quarantined(store)) or []
        wrong += [f"{row.id} is not what was written" for row in rows if not self._is_as_written(row)]
        found = verified is None or bool(verified.corrupt or verified.damage)
        if not (found or quarantined):
            wrong += [f"verify finds nothing: {why}" for why in refused if "replay verify" in why]
        return bool(refused or quarantined or found), wrong

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
    limits = Limits(successful_only=False, max_uses=9, cooldown=1, max_staleness=99, retire_solved=1.0)
    wanted = replace(request(5, 30), limits=limits)
    return [row.trajectory for row in store.draw(wanted, make_sampler("success", 0))]


def _remembered(store: ReplayStore) -> None:
    """What was altered is not answered."""
    assert all(found == OBSERVED for found in store.remembered(OBSERVED.environment, [OBSERVED.task]))


QUESTIONS: dict[str, Callable[[ReplayStore], Any]] = {
    "summary": lambda store: questions.summary(store, RUN),
    "page": lambda store: questions.page(store),
    "distributions": lambda store: questions.distributions(store, questions.Query()),
    "iteration": lambda store: questions.iteration(store, RUN, 3),
    "runs": lambda store: questions.runs(store),
    "progress": lambda store: questions.progress(store, store.run(RUN)),
    "series": lambda store: questions.metric_series(store, RUN),
    "task": lambda store: questions.task(store, "task-1"),
    "trajectory": lambda store: questions.trajectory(store, "long"),
    "overview": lambda store: questions.overview(store, "long"),
    "tokens": lambda store: questions.tokens(store, "long", 1),
    "tickets": lambda store: store.tickets.counts(RUN),
    "ended groups": lambda store: store.tickets.ended_groups(RUN),
    "planned batches": lambda store: store.tickets.planned(RUN, after=0),
    "ended run": lambda store: store.roles.view(RUN, lease_s=60.0).has_ended,
    "workers": lambda store: store.roles.listed("worker", RUN),
    "engines": lambda store: store.roles.listed("engine", RUN),
    "observations": _remembered,
    "held-out": lambda store: questions.held_out(store, RUN),
    "held-out task": lambda store: questions.held_out_task(store, RUN, "held-out"),
}


PAGES = page_addresses((RUN, OTHER), "task-1", ("long", "cut", "redacted"), held_out="held-out")
