import json
from dataclasses import replace

import pytest

from context.messages import Message
from replay import ReplayStore, questions
from replay.errors import ContentGone
from replay.records import TaskRecord
from replay.sampling.samplers import make_sampler
from replay.storage.counters import LEASE_DRAWS
from replay.storage.format.rows import plain_text
from replay.storage.retention import Capacity
from tests.fakes.records import RUN, Fresh, a_run, group, iterate, put, request, sql, trajectory

EVICTED = "select iteration, slot from trajectories where state = 'evicted' order by 1, 2"
TABLES = ("trajectories", "segments", "messages", "token_scores", "reclaimed")


def filled(store: ReplayStore, iterations: int = 3, *, count: int = 0) -> None:
    sampler = make_sampler("uniform", 3)
    for iteration in range(1, iterations + 1):
        iterate(store, iteration, sampler, count=count)


def evict(store: ReplayStore, iteration: int, **limits: int) -> dict[str, float]:
    return store.evict(RUN, iteration, Capacity(**limits))


def reclaim(store: ReplayStore, iteration: int, **limits: int) -> int:
    evict(store, iteration, **limits)
    return store.purge(RUN, iteration)


def evicted(store: ReplayStore) -> list[tuple[int, int]]:
    return [(int(iteration), int(slot)) for iteration, slot in sql(store, EVICTED)]


def counts(store: ReplayStore, *tables: str) -> list[int]:
    return [sql(store, f"select count(*) from {table}")[0][0] for table in tables]


def rows_of(iteration: int, slots: range = range(8)) -> list[tuple[int, int]]:
    return [(iteration, slot) for slot in slots]


@pytest.mark.parametrize(
    ("limits", "gone"),
    [
        # After iteration 4: 4 - 2 = 2, so rows of iterations before the second.
        ({"age": 2}, rows_of(1)),
        # 8 by age; of the 24 left, 4 more.
        ({"age": 2, "rows": 20}, rows_of(1) + rows_of(2, range(4))),
        ({"age": 100, "rows": 100, "bytes": 10**9}, []),
        # The iteration itself stays, whatever the limit.
        ({"rows": 1}, rows_of(1) + rows_of(2) + rows_of(3)),
    ],
)
def test_limits_evict_the_oldest_rows(store: ReplayStore, limits: dict[str, int], gone: list[tuple[int, int]]) -> None:
    filled(store, 4)
    store.add_run(a_run("teacher"))
    Fresh(1, run="teacher").append_to(store)
    for _ in range(2):
        evict(store, 4, **limits)
        assert evicted(store) == gone
    assert sql(store, "select count(*) from trajectories where run = 'teacher' and state = 'eligible'") == [(4,)]


def test_bytes_over_the_limit_go_and_metrics_say_what_is_kept(store: ReplayStore) -> None:
    filled(store)
    sizes = [int(size) for (size,) in sql(store, "select num_bytes from trajectories order by iteration, slot")]
    # Room for the newest 10 rows and a half of the one before: 14 of 24 go.
    metrics = evict(store, 3, bytes=sum(sizes[14:]) + sizes[13] // 2)
    assert evicted(store) == rows_of(1) + rows_of(2, range(6))
    assert (metrics["buffer/bytes"], metrics["buffer/evicted_bytes"]) == (sum(sizes[14:]), sum(sizes[:14]))
    assert (metrics["buffer/rows"], metrics["buffer/evicted"], metrics["buffer/evicted_by_bytes"]) == (10, 14, 14)


def test_reserved_rows_stay(store: ReplayStore) -> None:
    filled(store)
    drawn = store.draw(request(4, 3), make_sampler("uniform", 5))
    places = {(row.trajectory.record.iteration, row.trajectory.record.slot) for row in drawn}
    evict(store, 4, rows=1)
    assert set(evicted(store)) == set(rows_of(1) + rows_of(2) + rows_of(3)) - places
    assert len(places) == 3
    # Their trainer has died, and others have drawn since.
    sql(store, "update buffer_state set value = value + ? where name = 'draws'", LEASE_DRAWS + 1)
    evict(store, 4, rows=1)
    assert len(evicted(store)) == 23


def hide_keys(messages: tuple[Message, ...]) -> list[Message] | None:
    if "burn this" in messages[0].content:
        return None
    return [replace(message, content=message.content.replace("sk-abc123", "[key]")) for message in messages]


def test_redacted_row_keeps_its_new_messages_and_loses_its_tokens(store: ReplayStore) -> None:
    texts = {"a": "nothing to hide", "b": "my key is sk-abc123", "c": "burn this"}
    rows = [trajectory(id, slot=slot, messages=(Message("user", texts[id]),)) for slot, id in enumerate(texts)]
    report = put(store, *rows, redact=hide_keys)
    assert (report.inserted, report.redacted) == (3, 2)
    kept = sql(store, "select trajectory, said from messages order by 1")
    found = [(id, json.loads(plain_text(said))[0]["content"]) for id, said in kept]
    assert found == [("a", "nothing to hide"), ("b", "my key is [key]")]
    assert sql(store, "select distinct trajectory from segments") == [("a",)]
    left = "select state, state_reason, content_hash, segments_checksum from trajectories where id <> 'a'"
    assert sql(store, left) == [("evicted", "redacted", "", None)] * 2
    assert put(store, *rows, redact=hide_keys).duplicates == 3
    for id in ("b", "c"):
        with pytest.raises(ContentGone, match="redacted"):
            store.read([id])


def test_redacted_row_counts_as_kept_until_a_limit_evicts_it(store: ReplayStore) -> None:
    rows = [trajectory(f"r{slot}", slot=slot) for slot in range(4)]
    put(store, *rows[:2], redact=lambda said: said[:1])
    put(store, *rows[2:])
    state = "select state, state_reason from trajectories where id = 'r0'"
    assert store.purge(RUN, 9) == 0
    # 4 rows, one too many: what can't be drawn goes first.
    metrics = evict(store, 2, rows=3)
    assert (metrics["buffer/rows"], metrics["buffer/evicted"]) == (3, 1)
    assert sql(store, state) == [("evicted", "capacity.rows at iteration 2, was redacted")]
    store.resume(RUN, 1)
    assert sql(store, state) == [("evicted", "redacted")]
    assert reclaim(store, 2, rows=3) == 1
    assert counts(store, "trajectories", "messages", "reclaimed") == [3, 3, 1]


def test_purge_leaves_a_few_numbers_of_a_row_and_nothing_else(store: ReplayStore) -> None:
    filled(store, count=4)
    facts = "id, group_id, slot, member, attempt, source, reward, success, advantage, policy_version_min"
    before = sql(store, f"select {facts} from trajectories where iteration = 1 order by slot")
    other = "select run, iteration, slot, trajectory, drift_mean from draws order by 1, 2, 3"
    draws, groups = sql(store, other), sql(store, "select * from groups order by id")
    evict(store, 3, age=1)
    assert (store.purge(RUN, 2), counts(store, *TABLES)) == (0, [24, 24, 24, 0, 0])
    assert (store.purge(RUN, 3), counts(store, *TABLES)) == (8, [16, 16, 16, 0, 8])
    assert store.purge(RUN, 3) == 0
    assert sql(store, f"select {facts} from reclaimed order by slot") == before
    assert sql(store, "select distinct state_reason from reclaimed") == [("capacity.age at iteration 3, was eligible",)]
    assert (sql(store, other), sql(store, "select * from groups order by id")) == (draws, groups)
    found = store.verify()
    assert (found.checked, found.corrupt, found.damage) == (16, {}, [])
    sql(store, "delete from reclaimed")
    count, _, about = store.verify().damage[0].partition(" ")
    assert int(count) >= 8 and about == "rows whose draws.trajectory names a missing one"


def test_payload_of_a_task_goes_with_its_last_row_and_comes_back_with_it(store: ReplayStore) -> None:
    made = TaskRecord("made-1", "lookup_chain", {"text": "long"})
    store.append([made], [group(task="made-1")], [trajectory("a", task="made-1")])
    payload = "select payload from tasks where hash = 'made-1'"
    before = sql(store, payload)
    reclaim(store, 2, age=1)
    assert sql(store, payload) == before  # of an iteration that is not old enough
    reclaim(store, 3, age=1)
    assert sql(store, payload) == [('{"removed":true}',)]
    again = trajectory("b", group="g2", task="made-1", iteration=3)
    store.append([made], [group("g2", task="made-1", iteration=3)], [again])
    assert sql(store, payload) == before


def test_reclaimed_row_is_known_to_lineage_and_questions(store: ReplayStore) -> None:
    filled(store, count=4)
    of_first = "select id from trajectories where iteration = 1"
    ((id,),) = sql(store, f"select min(trajectory) from draws where stream = 'replay' and trajectory in ({of_first})")

    before, uses = questions.iteration(store, RUN, 2), questions.overview(store, str(id))["uses"]
    reclaim(store, 3, age=1)
    reason = "capacity.age at iteration 3, was eligible"
    gone = {"state": "evicted", "state_reason": reason}
    rows = [{**row, **(gone if row["collected_iteration"] == 1 else {})} for row in before["trajectories"]]
    assert questions.iteration(store, RUN, 2) == {**before, "trajectories": rows}
    shown = questions.trajectory(store, str(id))
    assert shown["uses"] == uses and len(uses) > 1
    assert (shown["state"], shown["state_reason"], shown["task"]["hash"]) == ("evicted", reason, "task-1")
    with pytest.raises(ContentGone, match=r"got an evicted one \(capacity.age at iteration 3, was eligible\)"):
        store.read([str(id)])
    with pytest.raises(ContentGone):
        questions.tokens(store, str(id))
    summary, about = questions.summary(store), questions.task(store, "task-1")
    assert (summary["trajectories"], summary["reclaimed"], summary["groups"]) == (16, 8, 6)
    # Groups of 4 with rates 0.5 and 0.25 in each of three iterations.
    assert (about["attempts"], about["successes"], about["groups_in_all"], about["eligible"]) == (24, 9, 6, 16)
