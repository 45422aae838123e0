from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from context.messages import ToolCall
from context.tokens.token_sequence import Segment
from replay import InvalidRecord, ReplayStore
from replay.records import GroupRecord, TaskRecord, Trajectory
from replay.sampling.samplers import make_sampler
from replay.storage.validate import summarised
from replay.storage.write import AppendReport
from tests.fakes.records import AUTHORS, SHORT, group, request, run_record, sql, task, tokens, trajectory


def assert_same(found: Trajectory, given: Trajectory) -> None:
    assert found.messages == given.messages
    assert replace(found.record, content_hash="") == summarised([given], AUTHORS)[0].record
    assert len(found.segments) == len(given.segments)
    for mine, theirs in zip(found.segments, given.segments, strict=True):
        assert (mine.reason, mine.behavior_context) == (theirs.reason, theirs.behavior_context)
        assert mine.tokens.equals(theirs.tokens)


def test_round_trip_is_bit_equal(store: ReplayStore) -> None:
    long = tokens(list(range(300)), ["template"] * 100 + ["llm"] * 120 + ["llm(discard)"] * 80, version=3)
    given = [
        trajectory("a", segments=(Segment(SHORT), Segment(long, "old turns clipped"))),
        trajectory("b", error_kind="unknown_tool", mean_entropy=None, parent="a", success=False, reward=-0.1),
    ]
    assert store.append([task()], [group()], given) == AppendReport(inserted=2, duplicates=0, clipped=0)
    for found, row in zip(store.read(["b", "a"]), reversed(given), strict=True):
        assert_same(found, row)


def test_tool_calls_of_any_json_come_back(store: ReplayStore) -> None:
    arguments = {"a": [1, 2.5, None, True, "\x00\udc80 ü"], "b": {"c": {}}, "d": 10**30}
    call = replace(trajectory("a").messages[2], tool_calls=(ToolCall("t", arguments), ToolCall("u", {}, "id")))
    store.append([task()], [group()], [replace(trajectory("a"), messages=(call,))])
    assert store.read(["a"])[0].messages == (call,)


@pytest.mark.parametrize(
    ("tasks", "groups", "other", "message"),
    [
        ([], [], trajectory("a", reward=0.25), "^reward must be the stored"),
        ([], [], trajectory("a", segments=(Segment(tokens([5, 6], ["user", "llm"])),)), "^content_hash must be the st"),
        ([], [], trajectory("a", segments=(Segment(SHORT, "another reason"),)), "^content_hash must be the stored"),
        ([replace(task(), payload={"hops": 3})], [], None, r"^payload must be the stored .* in tasks? task-1"),
        ([], [group(success_rate=0.75)], None, r"^success_rate must be the stored 0.5 .* got 0.75"),
        ([], [], trajectory("c", group="none"), "^group must be appended with or before its members, got 'none'"),
        ([], [], trajectory("c", iteration=2), r"^iteration must be that of its group \(1\), got 2"),
    ],
)
def test_row_that_disagrees_with_what_is_stored_is_an_error_and_nothing_is_stored(
    store: ReplayStore, tasks: list[TaskRecord], groups: list[GroupRecord], other: Trajectory | None, message: str
) -> None:
    store.append([task()], [group()], [trajectory("a")])
    with pytest.raises(InvalidRecord, match=message):
        store.append(tasks, [group("g2"), *groups], [trajectory("b"), *([other] if other else [])])
    assert sql(store, "select id from trajectories union all select id from groups") == [("a",), ("group-1",)]


def test_run_is_added_once_and_keeps_its_authors(store: ReplayStore) -> None:
    store.add_run(replace(run_record(), code_version="0.2.0"))
    assert store.run() == run_record()
    with pytest.raises(InvalidRecord, match="^authors_hash must be the stored"):
        store.add_run(replace(run_record(), authors_hash="0" * 64))


def test_log_probs_just_above_zero_are_stored_as_zero_and_counted(store: ReplayStore) -> None:
    values = SHORT.behavior_log_probs.copy()
    values[2] = 5e-7
    segments = (Segment(replace(SHORT, behavior_log_probs=values)),)
    report = store.append([task()], [group()], [trajectory("a", segments=segments)])
    assert report.clipped == 1
    assert store.read(["a"])[0].segments[0].tokens.behavior_log_probs[2] == 0.0


def test_row_without_a_trained_token_is_untrainable(store: ReplayStore) -> None:
    sampled = Segment(tokens([1, 2], ["user", "llm(do_not_train)"]))
    unsampled = Segment(tokens([1, 2], ["user", "env"]))
    store.append([task()], [group()], [trajectory("a", segments=(sampled,)), trajectory("b", segments=(unsampled,))])
    assert [row.record.state for row in store.read(["a", "b"])] == ["untrainable", "untrainable"]
    assert np.isnan(store.read(["b"])[0].record.mean_behavior_log_prob)
    assert store.available(request(2, 1), make_sampler("uniform", 0)).rows == 0
