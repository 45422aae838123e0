"""A run that workers collect: where every episode is, who takes part, and who waits for whom."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from replay import ReplayStore, questions
from replay.questions.who_waits import advised_command, seconds
from replay.records import FRESH
from replay.storage.collecting.fresh_groups import FreshRequest
from replay.ticket_records import EVALUATION
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
    answer = cluster(store)
    counts = answer["counts"]
    parts = {name: counts[name] for name in ("done", "fresh", "late", "unused", "waiting", "open")}
    assert parts == {"done": 8, "fresh": 3, "late": 0, "unused": 2, "waiting": 2, "open": 1}
    assert (counts["rows"], counts["adds_up"], counts["failed"], answer["late_share"]) == (8, True, 1, 0.0)
    for table, column in (("draws", "trajectory"), ("segments", "trajectory"), ("messages", "trajectory"),
                          ("trajectories", "id")):  # fmt: skip
        one = "(select id from trajectories where state = 'eligible' order by id limit 1)"
        sql(store, f"delete from {table} where {column} = {one}")
    counts = cluster(store)["counts"]
    assert (counts["done"], counts["rows"], counts["adds_up"]) == (8, 7, False)


def test_late_rows_are_a_share_of_those_that_were_to_be_fresh(store: ReplayStore) -> None:
    issue(store, [0], size=3)
    collect(store, 3)
    close(store, 0)
    for iteration in range(1, 4):
        store.add_policy(policy(iteration))
    learn(store, 4, planned_for=1)
    answer = cluster(store)
    assert (answer["counts"]["fresh"], answer["counts"]["late"], answer["late_share"]) == (0, 3, 1.0)
    assert answer["counts"]["adds_up"]


# Who takes part


def test_workers_and_engines_say_of_themselves_what_is_known(store: ReplayStore) -> None:
    issue(store, [0])
    facts = {"host": "node-1", "pid": 4711, "in_flight": 2, "done": 5, "failed": 1, "tool_errors": 3}
    work(store, **facts, concurrency=32, state="working")
    claim(store, "worker-2", count=2)
    serve(store)
    answer = cluster(store)
    (worker,), (engine,) = answer["workers"], answer["engines"]
    assert {name: worker[name] for name in (*facts, "leased")} == facts | {"leased": 2}
    assert worker["silent_s"] >= 0 and worker["age_s"] >= 0
    assert (engine["id"], engine["state"], engine["version"]) == ("http://node-0:8801", "serving", 3)
    assert (engine["difference"], engine["label"], engine["adapter"]) == (1.5e-5, None, None)
    for odd in (None, True, "12", [1], {"a": 1}, 10**400, -(2**60), 1.5):  # a fact of another kind is unknown
        work(store, host=[odd], pid=odd)
        store.roles.report("engine", RUN, engine["id"], {"label": {"a": odd}, "version": odd, "difference": [odd]})
        answer = cluster(store)
        (worker,), (engine,) = answer["workers"], answer["engines"]
        assert (worker["host"], worker["pid"], worker["done"]) == (None, None, None)
        assert (engine["label"], engine["version"], engine["difference"]) == (None, None, None)


# Who waits for whom


def test_who_waits_in_each_state_of_a_run(store: ReplayStore) -> None:
    """One run, step by step: what is said, who waits, and who has to be started."""

    def says(text: str, who: str, advice: str | None = None) -> None:
        waits = cluster(store)["waits"]
        assert (sentence(store), waits["who"], waits["advice"]) == (text, who, advice)

    lead(store)
    says("No ticket has been issued: the training process collects by itself.", "nobody")
    work(store)
    says("Workers wait for tickets: the learner has issued none yet.", "workers")
    issue(store, range(4))
    issue(store, [4, 5], iteration=2)
    begin = "The learner waits for 4 of 4 groups of batch 1"
    says(f"{begin}.", "learner")
    silence(store, "workers")
    says(f"{begin}, and no worker has reported for N s.", "learner", "worker")
    work(store)
    serve(store, "publishing")
    says(f"{begin}, and no engine is serving.", "learner")
    serve(store)
    silence(store, "engines")
    collect(store, 2)
    claim(store, "worker-2")
    says("The learner waits for 3 of 4 groups of batch 1.", "learner")
    sql(store, "update tickets set due = due - 1000 where holder = 'worker-2' and state = 'leased'")
    issue(store, [9], purpose=EVALUATION)
    says("The learner waits for 2 evaluation episodes.", "learner")
    store.tickets.revoke(RUN, EVALUATION, "enough")
    collect(store, 6)
    says("Nobody waits: the learner updates, and workers collect 4 issued episodes.", "nobody")
    serve(store, "publishing")
    says("The learner updates, and workers wait for an engine: no engine is serving.", "workers")
    silence(store, "workers")
    gone = "no worker has reported for N s"
    says(f"The learner updates, but nobody collects 4 issued episodes: {gone}.", "nobody", "worker")
    work(store)
    lead(store, lease_s=-5.0)
    over = "the lease of the learner learner-1 is over since N s"
    says(f"Workers still collect 4 issued episodes, but {over}.", "nobody", "learner")
    collect(store, 4)
    says(f"Workers wait for a learner: {over}.", "workers", "learner")
    lead(store)
    says("Workers wait for tickets: the learner updates.", "workers")
    store.roles.end_run(RUN)
    says("The run has ended: nobody waits.", "nobody")


def test_a_learner_that_updates_meanwhile_does_not_wait_for_an_earlier_batch(store: ReplayStore) -> None:
    """It goes on with rows of the buffer while a batch takes longer."""
    work(store)
    lead(store)
    issue(store, [0], size=1)
    collect(store, 1)
    close(store, 0)
    issue(store, [1])
    assert sentence(store).startswith("The learner waits for 1 of 2 groups of batch 1.")
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
    assert sentence(store) == "The learner waits for 1 of 1 group of batch 2."


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
    times = {0: "0 s", 41.2: "41 s", 119: "119 s", 120: "2 min", 7200: "2 h", 200_000: "2 d", -1: "0 s"}
    assert {given: seconds(given) for given in times} == times
