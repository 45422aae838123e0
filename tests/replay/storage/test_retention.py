from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from context.messages import Message
from context.tokens.token_sequence import Segment
from replay import ReplayStore
from replay.errors import ContentGone
from replay.sampling.samplers import make_sampler
from replay.storage.counters import LEASE_DRAWS
from replay.storage.databases import Location
from replay.storage.format.message_json import plain_text
from replay.storage.retention import Capacity
from tests.fakes.records import (
    ENV,
    LLM,
    RUN,
    TEMPLATE,
    USER,
    FreshRows,
    group,
    iterate,
    new_store,
    request,
    run_record,
    sql,
    task,
    tokens,
    trajectory,
)

EVICTED = "select iteration, slot from trajectories where state = 'evicted' order by 1, 2"
CONTENT = "select count(distinct trajectory) from {}"


def filled(location: Location, iterations: int = 3) -> ReplayStore:
    """8 rows each, in two groups of one task; nothing drawn."""
    store = new_store(location)
    for iteration in range(1, iterations + 1):
        iterate(store, iteration, make_sampler("uniform", 0), count=0)
    return store


def evict(store: ReplayStore, iteration: int, **limits: int) -> dict[str, float]:
    return store.evict(RUN, iteration, policy_version=iteration, capacity=Capacity(**limits))


def evicted(store: ReplayStore) -> list[tuple[int, int]]:
    return [(int(iteration), int(slot)) for iteration, slot in sql(store, EVICTED)]


def content(store: ReplayStore) -> tuple[int, int]:
    """Rows with tokens, rows with messages."""
    tokens_of, messages_of = (sql(store, CONTENT.format(table))[0][0] for table in ("segments", "messages"))
    return tokens_of, messages_of


def rows_of(iteration: int, slots: range = range(8)) -> list[tuple[int, int]]:
    return [(iteration, slot) for slot in slots]


def test_rows_over_the_limit_go_the_oldest_first(location: Location) -> None:
    store = filled(location)
    metrics = evict(store, 3, rows=12)
    # 24 - 12 = 12: all 8 of the first iteration, then 4 of the second.
    assert evicted(store) == rows_of(1) + rows_of(2, range(4))
    assert (metrics["buffer/rows"], metrics["buffer/evicted"], metrics["buffer/evicted_by_rows"]) == (12, 12, 12)
    assert sql(store, "select distinct state_reason from trajectories where state = 'evicted'") == [
        ("capacity.rows at iteration 3, was eligible",)
    ]


def test_bytes_over_the_limit_go_the_oldest_first(location: Location) -> None:
    store = filled(location)
    sizes = [int(size) for (size,) in sql(store, "select num_bytes from trajectories order by iteration, slot")]
    # Room for the newest 10 rows and a half of the one before: 14 of 24 go.
    metrics = evict(store, 3, bytes=sum(sizes[14:]) + sizes[13] // 2)
    assert evicted(store) == rows_of(1) + rows_of(2, range(6))
    assert (metrics["buffer/bytes"], metrics["buffer/evicted_bytes"]) == (sum(sizes[14:]), sum(sizes[:14]))


@pytest.mark.parametrize(
    ("limits", "gone"),
    [
        # After iteration 4: 4 - 2 = 2, so rows of iterations before the second.
        ({"age": 2}, rows_of(1)),
        # Rows of iteration i were sampled by policy i - 1, and policy 4 is out: staleness 4, 3, 2, 1.
        ({"staleness": 2}, rows_of(1) + rows_of(2)),
        # All are of one task: 32 - 20.
        ({"per_task": 20}, rows_of(1) + rows_of(2, range(4))),
        # 8 by age; of the 24 left, 4 more.
        ({"age": 2, "rows": 20}, rows_of(1) + rows_of(2, range(4))),
        ({"age": 2, "rows": 30}, rows_of(1)),
        ({"age": 100, "staleness": 100, "rows": 100, "bytes": 10**9, "per_task": 100}, []),
        # The iteration itself stays, whatever the limit.
        ({"rows": 1}, rows_of(1) + rows_of(2) + rows_of(3)),
    ],
)
def test_limits_evict(location: Location, limits: dict[str, int], gone: list[tuple[int, int]]) -> None:
    store = filled(location, 4)
    evict(store, 4, **limits)
    assert evicted(store) == gone
    evict(store, 4, **limits)
    assert evicted(store) == gone


def test_reserved_rows_stay(location: Location) -> None:
    store = filled(location)
    drawn = store.draw(request(4, 3), make_sampler("uniform", 5))
    places = {(row.trajectory.record.iteration, row.trajectory.record.slot) for row in drawn}
    evict(store, 4, rows=1)
    assert set(evicted(store)) == set(rows_of(1) + rows_of(2) + rows_of(3)) - places
    assert len(places) == 3
    # Their trainer has died, and others have drawn since.
    sql(store, "update buffer_state set value = value + ? where name = 'draws'", LEASE_DRAWS + 1)
    evict(store, 4, rows=1)
    assert len(evicted(store)) == 23


def test_rows_of_other_runs_stay_and_count_for_nothing(location: Location) -> None:
    store = filled(location, 2)
    store.add_run(run_record("teacher"))
    FreshRows(1, run="teacher").append_to(store)
    evict(store, 2, rows=12, age=1)
    assert evicted(store) == rows_of(1, range(4))
    assert sql(store, "select count(*) from trajectories where run = 'teacher' and state = 'eligible'") == [(4,)]


def test_content_goes_with_the_checkpoint_that_no_resume_goes_back_before(location: Location) -> None:
    store = filled(location)
    evict(store, 2, age=1)
    assert evicted(store) == []
    evict(store, 3, age=1)
    assert (len(evicted(store)), content(store)) == (8, (24, 24))
    assert store.purge(RUN, 2) == 0
    assert store.purge(RUN, 3) == 8
    assert content(store) == (16, 16)
    assert store.purge(RUN, 3) == 0


def spoken(id: str, ids: list[int], **changes: Any) -> Any:
    segments = (Segment(tokens(ids, [TEMPLATE, USER, LLM, LLM, ENV, LLM])),)
    return trajectory(id, segments=segments, **changes)


def hide_keys(messages: tuple[Message, ...]) -> list[Message] | None:
    if any("burn this" in message.content for message in messages):
        return None
    return [replace(message, content=re.sub(r"sk-\w+", "[key]", message.content)) for message in messages]


def said(id: str, text: str, slot: int) -> Any:
    return replace(spoken(id, [5, 6, 7, 8, 9, 10], slot=slot), messages=(Message("user", text),))


def test_redacted_row_keeps_its_new_messages_and_loses_its_tokens(store: ReplayStore) -> None:
    rows = [said("a", "nothing to hide", 0), said("b", "my key is sk-abc123", 1), said("c", "burn this", 2)]
    report = store.append([task()], [group()], rows, redact=hide_keys)
    assert (report.inserted, report.redacted) == (3, 2)
    kept = dict(sql(store, "select trajectory, said from messages"))
    assert {id: [said["content"] for said in json.loads(plain_text(text))] for id, text in kept.items()} == {
        "a": ["nothing to hide"],
        "b": ["my key is [key]"],
    }
    assert sql(store, "select distinct trajectory from segments") == [("a",)]
    hashes = "select id, state, state_reason, content_hash = '', segments_checksum is null from trajectories order by id"
    assert [tuple(map(str, row[:3])) + tuple(map(bool, row[3:])) for row in sql(store, hashes)] == [
        ("a", "eligible", "None", False, False),
        ("b", "evicted", "redacted", True, True),
    ]
    # Of the last one not even a message is left.
    assert sql(store, "select id, state_reason from reclaimed") == [("c", "redacted")]
    assert store.append([task()], [group()], rows, redact=hide_keys).duplicates == 3
    with pytest.raises(ContentGone, match="redacted"):
        store.read(["b"])
