"""A run that workers collect: where every episode is, who takes part, and who waits for whom."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from replay import ReplayStore, questions
from replay.questions.who_waits import advised_command, seconds
from replay.records import FRESH
from replay.storage.collecting.fresh_groups import FreshRequest
from replay.ticket_records import EVALUATION, TRAIN
from tests.fakes.records import RUN, iteration_record, measured, policy, run_record, sql
from tests.replay.storage.collecting.episodes import claim, close, collect, episode, issue


def cluster(store: ReplayStore) -> dict[str, Any]:
    answer = questions.cluster(store, store.run(RUN))
    json.dumps(answer, allow_nan=False)
    return answer


def sentence(store: ReplayStore) -> str:
    """With every time as N s."""
    text: str = cluster(store)["waits"]["text"]
    return re.sub(r"\b\d+ (s|min|h|d)\b", "N s", text)


def who(store: ReplayStore) -> tuple[str, str | None]:
    waits = cluster(store)["waits"]
    return waits["who"], waits["advice"]


def lead(store: ReplayStore, *, lease_s: float = 600.0) -> None:
    store.roles.lead(RUN, "learner-1", lease_s=lease_s)


def work(store: ReplayStore, name: str = "worker-2", **facts: Any) -> None:
    store.roles.report("worker", RUN, name, facts)


def serve(store: ReplayStore, state: str = "serving", name: str = "http://node-0:8801") -> None:
    store.roles.report("engine", RUN, name, {"state": state, "version": 3, "difference": 1.5e-5})


def silence(store: ReplayStore, table: str, seconds: float = 80.0) -> None:
    sql(store, f"update {table} set seen_at = seen_at - {seconds}")


def learn(store: ReplayStore, iteration: int, *, staleness: int = 2, planned_for: int | None = None) -> None:
    """The update of an iteration from all that waits for it."""
    drawn = store.tickets.draw_fresh(FreshRequest(RUN, iteration, planned_for or iteration, iteration - 1, staleness))
    records = [row.draw for row in drawn.rows if row.draw is not None]
    store.commit(iteration_record(iteration, replay=0), measured(records), sampler_state={})
    store.add_policy(policy(iteration))


# Where every finished episode is


def test_finished_episodes_are_the_sum_of_what_became_of_them(store: ReplayStore) -> None:
    issue(store, range(6))
    store.tickets.fail(claim(store, "worker-2"), "the engine gave no reply")
    collect(store, 3)
    for held in claim(store, count=2):
        store.tickets.finish([(held, episode(held, trained=False))])
    collect(store, 3)
    for number in (0, 1):
        close(store, number)
    store.tickets.close_groups(RUN, [2], {}, policy_version=0)
    learn(store, 1)
    close(store, 3)
    counts = cluster(store)["counts"]
    parts = {name: counts[name] for name in ("done", "fresh", "late", "unused", "waiting", "open")}
    assert parts == {"done": 8, "fresh": 3, "late": 0, "unused": 2, "waiting": 2, "open": 1}
    assert (counts["rows"], counts["adds_up"], counts["failed"]) == (8, True, 1)


def test_late_rows_are_a_share_of_those_that_were_to_be_fresh(store: ReplayStore) -> None:
    issue(store, [0], size=3)
    issue(store, [1], size=1, iteration=4)
    collect(store, 3)
    collect(store, 1, version=3)
    for number in (0, 1):
        close(store, number)
    for iteration in range(1, 4):
        store.add_policy(policy(iteration))
    learn(store, 4, planned_for=1)
    store.tickets.draw_fresh(FreshRequest(RUN, 5, 4, 3, 2))
    answer = cluster(store)
    assert (answer["counts"]["fresh"], answer["counts"]["late"]) == (0, 3)
    assert answer["late_share"] == 1.0
    assert answer["counts"]["adds_up"]


def test_a_lost_row_shows(store: ReplayStore) -> None:
    issue(store, [0])
    (id, _) = collect(store, 2)
    for table, column in (("segments", "trajectory"), ("messages", "trajectory"), ("trajectories", "id")):
        sql(store, f"delete from {table} where {column} = ?", id)
    counts = cluster(store)["counts"]
    assert (counts["done"], counts["rows"], counts["adds_up"]) == (2, 1, False)


# Tickets


def test_reasons_are_grouped_the_most_frequent_first(store: ReplayStore) -> None:
    issue(store, [0, 1, 2])
    store.tickets.fail(claim(store, count=1), "overtime")
    store.tickets.fail(claim(store, count=2), "the engine gave no reply")
    store.tickets.revoke(RUN, TRAIN, "the run has ended")
    assert cluster(store)["reasons"] == [
        {"state": "revoked", "reason": "the run has ended", "count": 3},
        {"state": "failed", "reason": "the engine gave no reply", "count": 2},
        {"state": "failed", "reason": "overtime", "count": 1},
    ]


def test_evaluations_are_counted_apart(store: ReplayStore) -> None:
    issue(store, [0], purpose=EVALUATION)
    store.tickets.finish_evaluation(claim(store)[0], {"success": True})
    answer = cluster(store)
    assert {state: count for state, count in answer["evaluations"].items() if count} == {"queued": 1, "done": 1}
    assert answer["counts"]["done"] == 0


# Who takes part


def test_workers_and_engines_say_of_themselves_what_is_known(store: ReplayStore) -> None:
    issue(store, [0])
    work(store, host="node-1", pid=4711, concurrency=32, in_flight=2, done=5, failed=1, tool_errors=3, state="working")
    claim(store, "worker-2", count=2)
    serve(store)
    answer = cluster(store)
    (worker,), (engine,) = answer["workers"], answer["engines"]
    facts = {name: worker[name] for name in ("host", "pid", "in_flight", "done", "failed", "tool_errors", "leased")}
    assert facts == {
        "host": "node-1",
        "pid": 4711,
        "in_flight": 2,
        "done": 5,
        "failed": 1,
        "tool_errors": 3,
        "leased": 2,
    }
    assert worker["silent_s"] >= 0 and worker["age_s"] >= 0
    assert (engine["id"], engine["state"], engine["version"]) == ("http://node-0:8801", "serving", 3)
    assert (engine["difference"], engine["label"], engine["adapter"]) == (1.5e-5, None, None)


@pytest.mark.parametrize("odd", [None, True, "12", [1], {"a": 1}, 10**400, -(2**60), 1.5])
def test_a_fact_of_another_kind_is_unknown(store: ReplayStore, odd: Any) -> None:
    work(store, host=[odd], pid=odd)
    store.roles.report("engine", RUN, "e", {"label": {"a": odd}, "version": odd, "difference": [odd]})
    answer = cluster(store)
    (worker,), (engine,) = answer["workers"], answer["engines"]
    assert (worker["host"], worker["pid"], worker["done"]) == (None, None, None)
    assert (engine["label"], engine["version"], engine["difference"]) == (None, None, None)


def test_a_run_is_collected_by_workers_once_anybody_takes_part(store: ReplayStore) -> None:
    assert not questions.is_collected_by_workers(store, store.run(RUN))
    lead(store)
    serve(store)
    assert not questions.is_collected_by_workers(store, store.run(RUN))
    work(store)
    assert questions.is_collected_by_workers(store, store.run(RUN))
    store.roles.leave("worker", RUN, "worker-2")
    issue(store, [0])
    assert questions.is_collected_by_workers(store, store.run(RUN))


# Who waits for whom


def test_a_run_of_the_loop_waits_for_nobody(store: ReplayStore) -> None:
    lead(store)
    assert sentence(store) == "No ticket has been issued: the training process collects by itself."


def test_workers_wait_for_the_first_tickets(store: ReplayStore) -> None:
    work(store)
    lead(store)
    assert sentence(store) == "Workers wait for tickets: the learner has issued none yet."


def test_learner_waits_for_groups_of_its_batch(store: ReplayStore) -> None:
    work(store)
    lead(store)
    issue(store, range(4))
    issue(store, [4, 5], iteration=2)
    collect(store, 2)
    claim(store, "worker-2")
    text = "The learner waits for 3 of 4 groups of batch 1; the oldest episode was issued N s ago"
    assert sentence(store) == f"{text} and is with worker-2."
    assert who(store) == ("learner", None)
    sql(store, "update tickets set due = due - 1000 where holder = 'worker-2' and state = 'leased'")
    assert sentence(store) == f"{text}, and the lease of worker-2 on it is over: another worker may claim it."


def test_learner_waits_for_an_episode_that_nobody_has_claimed(store: ReplayStore) -> None:
    work(store)
    lead(store)
    issue(store, [0])
    text = "The learner waits for 1 of 1 group of batch 1; the oldest episode was issued N s ago"
    assert sentence(store) == f"{text}, and no worker has claimed it."


def test_learner_waits_and_no_worker_is_there(store: ReplayStore) -> None:
    lead(store)
    issue(store, [0])
    assert sentence(store) == "The learner waits for 1 of 1 group of batch 1, and no worker takes part."
    work(store)
    silence(store, "workers")
    assert cluster(store)["waits"]["text"].startswith("The learner waits for 1 of 1 group of batch 1, and no ")
    assert sentence(store).endswith("no worker has reported for N s.")
    assert who(store) == ("learner", "worker")


def test_learner_waits_and_no_engine_serves(store: ReplayStore) -> None:
    lead(store)
    work(store)
    serve(store, "publishing")
    issue(store, [0])
    assert sentence(store) == "The learner waits for 1 of 1 group of batch 1, and no engine is serving."
    serve(store)
    silence(store, "engines")
    assert "engine" not in sentence(store)


def test_learner_waits_for_evaluations_first(store: ReplayStore) -> None:
    work(store)
    lead(store)
    issue(store, [0])
    issue(store, [1], purpose=EVALUATION)
    claim(store, "worker-2")
    assert sentence(store) == (
        "The learner waits for 2 evaluation episodes; the oldest episode was issued N s ago and is with worker-2."
    )


def test_workers_wait_while_the_learner_updates(store: ReplayStore) -> None:
    work(store)
    lead(store)
    issue(store, [0])
    collect(store, 2)
    assert sentence(store) == "Workers wait for tickets: the learner updates."
    assert who(store) == ("workers", None)


def test_nobody_waits_while_the_next_batch_is_collected(store: ReplayStore) -> None:
    work(store)
    lead(store)
    issue(store, [0])
    issue(store, [1, 2], iteration=2)
    collect(store, 2)
    assert sentence(store) == "Nobody waits: the learner updates, and workers collect 4 issued episodes."
    assert who(store) == ("nobody", None)
    serve(store, "publishing")
    assert sentence(store) == "The learner updates, and workers wait for an engine: no engine is serving."
    silence(store, "workers")
    text = "The learner updates, but nobody collects 4 issued episodes: no worker has reported for N s."
    assert sentence(store) == text
    assert who(store) == ("nobody", "worker")


def test_a_learner_that_updates_meanwhile_does_not_wait_for_an_earlier_batch(store: ReplayStore) -> None:
    """It goes on with rows of the buffer while a batch takes longer."""
    work(store)
    lead(store)
    issue(store, [0], size=1)
    collect(store, 1)
    close(store, 0)
    issue(store, [1])
    assert sentence(store).startswith("The learner waits for 1 of 2 groups of batch 1;")
    drawn = store.tickets.draw_fresh(FreshRequest(RUN, 1, 1, 0, 2))
    assert [row.draw.stream for row in drawn.rows if row.draw] == [FRESH]
    assert sentence(store) == "Nobody waits: the learner updates, and workers collect 2 issued episodes."


def test_a_learner_whose_batch_is_whole_does_not_wait_for_the_next_one(store: ReplayStore) -> None:
    """After an update from replayed rows alone a batch has a smaller number than its iteration."""
    work(store)
    lead(store)
    store.commit(iteration_record(1, replay=0), [], sampler_state={})
    issue(store, [0])
    issue(store, [1], iteration=2)
    collect(store, 2)
    assert sentence(store) == "Nobody waits: the learner updates, and workers collect 2 issued episodes."
    close(store, 0)
    learn(store, 2, planned_for=1)
    assert sentence(store).startswith("The learner waits for 1 of 1 group of batch 2;")


def test_workers_wait_for_a_learner_that_is_gone(store: ReplayStore) -> None:
    work(store)
    issue(store, [0])
    assert sentence(store) == "Workers still collect 2 issued episodes, but no learner leads this run."
    lead(store, lease_s=-5.0)
    found = cluster(store)["leader"]
    assert (found["id"], found["holds"]) == ("learner-1", False)
    collect(store, 2)
    assert sentence(store) == "Workers wait for a learner: the lease of the learner learner-1 is over since N s."
    assert who(store) == ("workers", "learner")


def test_nobody_waits_once_the_run_has_ended(store: ReplayStore) -> None:
    issue(store, [0])
    store.roles.end_run(RUN)
    assert sentence(store) == "The run has ended: nobody waits."
    assert cluster(store)["ended"]


def test_other_runs_play_no_part(store: ReplayStore) -> None:
    before = cluster(store)
    issue(store, [0])
    collect(store, 1)
    work(store)
    serve(store)
    lead(store)
    store.add_run(run_record("run-2"))
    other = questions.cluster(store, store.run("run-2"))
    assert {**other, "run": RUN} == before


def test_advice_is_a_command_with_the_folder_of_the_run() -> None:
    assert advised_command("worker", Path("runs/one")) == ["agentloop", "worker", "--run", "runs/one"]
    assert advised_command("worker", None) == ["agentloop", "worker", "--run", "RUN"]
    assert advised_command("learner", Path("runs/one")) == ["agentloop", "train", "CONFIG", "--resume"]
    assert advised_command(None, Path("runs/one")) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [(0, "0 s"), (41.2, "41 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d"), (-1, "0 s")],
)
def test_times_are_said_as_people_say_them(given: float, words: str) -> None:
    assert seconds(given) == words
