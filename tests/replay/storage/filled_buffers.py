"""A small buffer with rows of every kind in every table, and what is asked of it."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from context.messages import Message as Said
from context.tokens.token_sequence import Segment
from replay import ReplayStore, questions
from replay.records import HeldOutEpisode, ObservationRecord
from replay.sampling.samplers import make_sampler
from replay.storage.collecting.ticket_records import PlannedBatch
from replay.storage.databases import Location
from replay.storage.retention import Capacity
from replay.storage.sessions import OpenSession
from tests.fakes.random_agents import TODAY
from tests.fakes.records import RUN, SHORT, Fresh, a_run, iterate, new_store, policy, put, session_row, trajectory
from tests.replay.storage.collecting.episodes import claim, collect, issue

OTHER = "run-2"

_FINGERPRINT = {"tokenizer": "tok", "template": "tpl", "model_family": "toy", "vocab_size": 99}
OBSERVED = ObservationRecord("call-1", "task-1", "tools-1", None, "look", {"n": 1}, "seen")
EVALUATED = HeldOutEpisode(RUN, 3, 0, "held-out", "tools", "1", 1.0, True, "answered", None, 1, 0, (Said("user", "7"),))


def fill(location: Location) -> None:
    with closing(new_store(location)) as store:
        store.add_run(replace(a_run(OTHER), fingerprint=_FINGERPRINT))
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
        Fresh(4, attempt=1).append_to(store)
        # The first iteration's rows have no content any more, the second's still have it.
        store.evict(RUN, 3, Capacity(age=1))
        store.purge(RUN, 3)
        store.evict(RUN, 4, Capacity(age=1))
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
        store.labels.add(["long"], "good", "short", by="ann")
        store.labels.add([RUN], "kept", by="ann", on="run")
        store.add_scores(RUN, 1, {("long", 0): np.zeros(6, np.float32), ("long", 1): np.ones(6, np.float32)})


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
    "tickets": lambda store: questions.cluster(store, store.run(RUN))["counts"],
    "ended groups": lambda store: store.tickets.ended_groups(RUN),
    "planned batches": lambda store: store.tickets.planned(RUN, after=0),
    "ended run": lambda store: store.roles.view(RUN, lease_s=60.0).has_ended,
    "workers": lambda store: store.roles.listed("worker", RUN),
    "engines": lambda store: store.roles.listed("engine", RUN),
    "observations": _remembered,
    "held-out": lambda store: questions.held_out(store, RUN),
    "held-out task": lambda store: questions.held_out_task(store, RUN, "held-out"),
}
