from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from context.messages import ToolCall
from context.tokens.token_sequence import Segment, TokenSequence
from replay import InvalidRecord, ReplayStore
from replay.records import GroupRecord, TaskRecord, Trajectory
from replay.sampling.samplers import make_sampler
from replay.storage.validate import SUMMARY, summarised
from replay.storage.write import AppendReport
from tests.fakes.records import AUTHORS, SHORT, a_run, group, put, request, sql, task, tokens, trajectory

NAN, INF = float("nan"), float("inf")
BIG = 2**31


def refuses(store: ReplayStore, bad: Any, message: str) -> None:
    """The whole append fails, also its good rows."""
    with pytest.raises(InvalidRecord, match=message) as raised:
        put(store, trajectory("good"), bad, trajectory("also good"))
    assert f" in trajectory {bad.id}. " in str(raised.value)
    with store.reading() as connection:
        assert connection.exec_driver_sql("select count(*) from trajectories").scalar() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": NAN}, "^reward must be a finite number, got nan in trajectory a"),
        ({"reward": "1"}, "^reward must be a valid number, got '1'"),
        ({"advantage": -INF}, "^advantage must be a finite number, got -inf"),
        ({"advantage": 1e300}, r"^advantage must be a number that float32 can hold, got 1e\+300"),
        ({"temperature": -1.0}, "^temperature must be greater than or equal to 0, got -1.0"),
        ({"top_p": 1.5}, "^top_p must be less than or equal to 1, got 1.5"),
        ({"source": "a/b"}, "^source must match pattern .*, got 'a/b'"),
        ({"iteration": True}, "^iteration must be a valid integer, got True"),
        ({"slot": BIG}, "^slot must be less than 2147483648"),
        ({"member": np.int64(0)}, "^member must be a valid integer"),
        ({"content_hash": "0" * 64}, "^content_hash must be that of the tokens"),
        ({"state": "orphaned"}, "^state must be 'eligible' for a new row"),
        ({"id": ""}, "^id must be a text of at least one character"),
        ({"stop_reason": None}, "^stop_reason must be a valid string, got None"),
        ({"agent_rewards": '{"scout":[NaN,0]}'}, "^agent_rewards.scout.0 must be a finite number, got nan"),
    ],
)
def test_record_field_is_refused_by_name(module_store: ReplayStore, changes: dict[str, Any], message: str) -> None:
    refuses(module_store, trajectory(**{"id": "a", **changes}), message)


def test_numbers_that_follow_from_the_tokens_are_filled_in(store: ReplayStore) -> None:
    hinted = Segment(replace(SHORT, behavior_log_probs=np.full(len(SHORT), np.nan, np.float32)), "clean", "hinted")
    demonstrated = Segment(TokenSequence.constant([1, 2, 3], AUTHORS.code("demonstration")))
    given = [
        trajectory("none given"),
        trajectory("others given", num_tokens=99, policy_version_max=9, mean_behavior_log_prob=-9.0),
        trajectory("two segments", segments=(Segment(SHORT), hinted)),
        trajectory("nobody sampled it", segments=(demonstrated,), policy_version_min=3, policy_version_max=4),
    ]
    put(store, *given)
    found = [row.record for row in store.read([row.id for row in given])]
    # SHORT has 6 tokens, 3 of them sampled by version 0 with log-probs -0.5, -1 and -1.5.
    numbers = [[getattr(record, name) for name in SUMMARY] for record in found]
    assert numbers[0] == numbers[1] == [6, 3, 6, 0, 0, -1.0, -1.5]
    assert numbers[2] == [12, 6, 6, 0, 0, -1.0, -1.5]
    assert numbers[3][:5] == [3, 3, 3, 3, 4] and np.isnan(numbers[3][5:]).all()
    assert repr([r.record for r in summarised(given, AUTHORS)]) == repr([replace(r, content_hash="") for r in found])
    report = store.append([], [], given)
    assert (report.inserted, report.duplicates) == (0, 4)


SAMPLED = "must be finite and at most 0 for a sampled token, got"
VERSION = r"\] must be >= 0 for a sampled token and -1 for others"


# SHORT is template, user, llm, llm, env, llm.
@pytest.mark.parametrize(
    ("field", "position", "value", "said"),
    [
        ("token_ids", 1, -1, r"^segments\[1\].token_ids\[1\] must be >= 0, got -1"),
        ("authors", 0, 99, r"^segments\[1\].authors\[0\] must be a code of the run's author table, got 99"),
        ("behavior_log_probs", 3, NAN, rf"^segments\[1\].behavior_log_probs\[3\] {SAMPLED} nan"),
        ("behavior_log_probs", 3, 0.01, f"{SAMPLED} 0.0"),
        ("behavior_log_probs", 4, 0.0, r"behavior_log_probs\[4\] must be NaN for a token that was not sampled, got 0."),
        ("policy_versions", 4, 3, rf"policy_versions\[4{VERSION}, got 3"),
        ("policy_versions", 5, -1, rf"policy_versions\[5{VERSION}"),
    ],
)
def test_wrong_token_is_refused(module_store: ReplayStore, field: str, position: int, value: float, said: str) -> None:
    values = getattr(SHORT, field).copy()
    values[position] = value
    segments = (Segment(SHORT), Segment(replace(SHORT, **{field: values})))
    refuses(module_store, trajectory("a", segments=segments), said)


@pytest.mark.parametrize("segments", [(), (Segment(TokenSequence.constant([], 0)),)])
def test_trajectory_without_tokens_is_refused(module_store: ReplayStore, segments: tuple[Segment, ...]) -> None:
    refuses(module_store, trajectory("a", segments=segments), "^segments must hold at least one token, got 0")


@pytest.mark.parametrize(
    ("of_task", "of_group", "said"),
    [
        (task(), group(success_rate=1.5), "^success_rate must be less than or equal to 1, got 1.5 in group group-1"),
        (task(), group(reward_std=NAN), "^reward_std must be a finite number"),
        (task(), group(size=0), "^size must be greater than or equal to 1"),
        *((replace(task(), payload={"x": bad}), group(), "^payload must be JSON") for bad in (NAN, {1, 2}, object())),
    ],
)
def test_task_or_group_is_refused_by_field(module_store: ReplayStore, of_task: Any, of_group: Any, said: str) -> None:
    with pytest.raises(InvalidRecord, match=said):
        module_store.append([of_task], [of_group], [])


def test_round_trip_is_bit_equal(store: ReplayStore) -> None:
    long = tokens(list(range(300)), ["template"] * 100 + ["llm"] * 120 + ["llm(discard)"] * 80, version=3)
    given = [
        trajectory("a", segments=(Segment(SHORT), Segment(long, "old turns clipped"))),
        trajectory("b", error_kinds="unknown_tool", mean_entropy=None, parent="a", success=False, reward=-0.1),
    ]
    # Tool calls have arguments of any JSON.
    arguments = {"a": [1, 2.5, None, True, "\x00\udc80 ü"], "b": {"c": {}}, "d": 10**30}
    call = replace(given[1].messages[2], tool_calls=(ToolCall("t", arguments), ToolCall("u", {}, "id")))
    given[1] = replace(given[1], messages=(call,))
    assert put(store, *given) == AppendReport(inserted=2, duplicates=0)
    for found, row in zip(store.read(["b", "a"]), reversed(given), strict=True):
        assert found.messages == row.messages
        assert replace(found.record, content_hash="") == summarised([row], AUTHORS)[0].record
        for mine, theirs in zip(found.segments, row.segments, strict=True):
            assert (mine.reason, mine.behavior_context) == (theirs.reason, theirs.behavior_context)
            assert mine.tokens.equals(theirs.tokens)


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
    put(store, trajectory("a"))
    with pytest.raises(InvalidRecord, match=message):
        store.append(tasks, [group("g2"), *groups], [trajectory("b"), *([other] if other else [])])
    assert sql(store, "select id from trajectories union all select id from groups") == [("a",), ("group-1",)]


def test_run_is_added_once_and_keeps_its_authors(store: ReplayStore) -> None:
    store.add_run(replace(a_run(), code_version="0.2.0"))
    assert store.run() == a_run()
    with pytest.raises(InvalidRecord, match="^authors_hash must be the stored"):
        store.add_run(replace(a_run(), authors_hash="0" * 64))


def test_log_probs_just_above_zero_are_stored_as_zero(store: ReplayStore) -> None:
    values = SHORT.behavior_log_probs.copy()
    values[2] = 5e-7
    segments = (Segment(replace(SHORT, behavior_log_probs=values)),)
    put(store, trajectory("a", segments=segments))
    assert store.read(["a"])[0].segments[0].tokens.behavior_log_probs[2] == 0.0


def test_row_without_a_trained_token_is_untrainable(store: ReplayStore) -> None:
    sampled = Segment(tokens([1, 2], ["user", "llm(do_not_train)"]))
    unsampled = Segment(tokens([1, 2], ["user", "env"]))
    put(store, trajectory("a", segments=(sampled,)), trajectory("b", segments=(unsampled,)))
    assert [row.record.state for row in store.read(["a", "b"])] == ["untrainable", "untrainable"]
    assert np.isnan(store.read(["b"])[0].record.mean_behavior_log_prob)
    assert store.available(request(2, 1), make_sampler("uniform", 0)).rows == 0
