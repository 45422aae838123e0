"""A run that workers collect: who takes part, and why episodes ended without a row."""

from __future__ import annotations

import json
from typing import Any

from replay import ReplayStore, questions
from tests.fakes.records import RUN, run_record, sql
from tests.replay.storage.collecting.episodes import claim, issue


def cluster(store: ReplayStore, run: str = RUN) -> dict[str, Any]:
    answer = questions.cluster(store, store.run(run))
    json.dumps(answer, allow_nan=False)
    return answer


def test_workers_and_engines_say_of_themselves_what_is_known_and_other_runs_play_no_part(store: ReplayStore) -> None:
    before = cluster(store)
    facts = {"host": "node-1", "pid": 4711, "in_flight": 2, "done": 5, "failed": 1, "tool_errors": 3}
    store.roles.report("worker", RUN, "worker-2", {**facts, "concurrency": 32, "state": "working"})
    store.roles.report("engine", RUN, "engine", {"state": "serving", "version": 3, "difference": 1.5e-5})
    store.roles.lead(RUN, "learner-1", lease_s=600.0)
    issue(store, [0])
    store.tickets.fail(claim(store, "worker-2"), "the engine gave no reply")
    answer = cluster(store)
    (worker,), (engine,) = answer["workers"], answer["engines"]
    assert {name: worker[name] for name in facts} == facts
    assert worker["silent_s"] >= 0 and worker["age_s"] >= 0 and not worker["gone"]
    assert (engine["id"], engine["state"], engine["version"]) == ("engine", "serving", 3)
    assert (engine["difference"], engine["label"], engine["adapter"]) == (1.5e-5, None, None)
    assert (answer["leader"]["id"], answer["leader"]["lease_s"] > 500, answer["ended"]) == ("learner-1", True, False)
    assert (answer["counts"]["failed"], answer["counts"]["done"], answer["counts"]["lost"]) == (1, 0, 0)
    assert answer["reasons"] == [{"state": "failed", "reason": "the engine gave no reply", "count": 1}]
    assert questions.is_collected_by_workers(store, store.run(RUN))
    store.add_run(run_record("run-2"))
    assert {**cluster(store, "run-2"), "run": RUN} == before
    sql(store, "update workers set seen_at = seen_at - 80")  # more than a lease
    assert cluster(store)["workers"][0]["gone"]


def test_a_fact_of_another_kind_is_unknown(store: ReplayStore) -> None:
    for odd in (None, True, "12", [1], {"a": 1}, 10**400, -(2**60), 1.5):
        store.roles.report("worker", RUN, "worker-2", {"host": [odd], "pid": odd})
        store.roles.report("engine", RUN, "engine", {"label": {"a": odd}, "version": odd, "difference": [odd]})
        answer = cluster(store)
        (worker,), (engine,) = answer["workers"], answer["engines"]
        assert (worker["host"], worker["pid"], worker["done"]) == (None, None, None)
        assert (engine["label"], engine["version"], engine["difference"]) == (None, None, None)
