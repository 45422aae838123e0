from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from replay import CorruptTrajectory, ReplayError, ReplayStore, stats
from replay.databases import Location
from replay.sampling import make_sampler
from replay.stats import Sort
from tests.replay.fakes import RUN, Born, group, iterate, new_store, request, run_record, sql, task, trajectory
from tests.replay.locations import Databases


@pytest.fixture(scope="module")
def store(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    """Four iterations, the last one resumed over; 8 fresh rows each, up to 3 drawn; two reserved for a fifth."""
    location = databases.new(tmp_path_factory.mktemp("run") / "replay.sqlite")
    store = new_store(location)
    sampler = make_sampler("success", 3)
    for iteration in range(1, 5):
        iterate(store, iteration, sampler, count=3)
    store.resume(RUN, 3)
    iterate(store, 4, sampler, count=3, attempt=1)
    store.draw(request(5, 2), sampler)
    store.close()
    with closing(ReplayStore.open(location, read_only=True)) as reader:
        yield reader


def test_summary_agrees_with_plain_sql(store: ReplayStore) -> None:
    answer = stats.summary(store)
    plain = (
        "select count(*), sum(num_tokens), sum(num_action_tokens), sum(cast(success as integer)), avg(reward) "
        "from trajectories"
    )
    names = ("trajectories", "tokens", "action_tokens", "successes", "reward_mean")
    assert tuple(answer[name] for name in names) == sql(store, plain)[0]
    for table in ("iterations", "policies", "groups", "tasks", "runs"):
        assert answer[table] == sql(store, f"select count(*) from {table}")[0][0]
    streams = dict(sql(store, "select stream, count(*) from draws where state='committed' group by stream"))
    assert {stream: answer["draws"][stream] for stream in ("fresh", "replay")} == streams
    plain = (
        "select count(distinct trajectory), avg(cast(staleness as double precision)), max(staleness) from draws "
        "where stream='replay' and state='committed'"
    )
    replayed = ("trajectories_replayed", "staleness_mean", "staleness_max")
    assert tuple(answer["draws"][name] for name in replayed) == sql(store, plain)[0]


def test_summary_by_hand(store: ReplayStore) -> None:
    answer = stats.summary(store)
    # 5 x 8 rows of 6 tokens, 3 of them sampled; 2 + 1 successes of 8.
    assert (answer["trajectories"], answer["tokens"], answer["action_tokens"], answer["successes"]) == (
        40,
        240,
        120,
        15,
    )
    assert {state: row["trajectories"] for state, row in answer["states"].items()} == {
        "eligible": 32,
        "orphaned": 8,
    }
    assert answer["draws"]["fresh"] == 32
    assert answer["draws"]["replay"] == 9
    assert answer["draws"]["reserved"] == 2
    assert answer["stop_reasons"] == {"final": 40}
    assert stats.summary(store, "another run")["trajectories"] == 0


def test_summary_of_an_empty_buffer_is_json_without_numbers_that_are_none(location: Location) -> None:
    answer = stats.summary(new_store(location))
    json.dumps(answer, allow_nan=False)
    assert (answer["trajectories"], answer["tokens"], answer["reward_mean"], answer["states"]) == (
        0,
        0,
        None,
        {},
    )


def test_listing_counts_uses_and_staleness(store: ReplayStore) -> None:
    rows = stats.trajectories(store)
    assert len(rows) == 40
    plain: dict[Any, Any] = dict(
        sql(store, "select trajectory, count(*) from draws where state='committed' group by trajectory")
    )
    assert {row["id"]: row["uses"] for row in rows} == {row["id"]: plain.get(row["id"], 0) for row in rows}
    # The newest policy is 4; rows of iteration i were sampled by policy i - 1.
    assert {(row["iteration"], row["staleness"]) for row in rows} == {(1, 4), (2, 3), (3, 2), (4, 1)}
    assert {row["state"] for row in rows if row["uses"] == 0} == {"orphaned"}


@pytest.mark.parametrize("sort", list(Sort))
def test_listing_is_sorted_the_greatest_first(store: ReplayStore, sort: Sort) -> None:
    key = {"turns": "num_turns", "tools": "num_tool_calls", "tokens": "num_tokens"}.get(sort, sort.value)
    values = [row[key] for row in stats.trajectories(store, sort=sort)]
    assert values == sorted(values, reverse=True)


def test_listing_filters_and_limits(store: ReplayStore) -> None:
    assert [row["success"] for row in stats.trajectories(store, success=True)] == [True] * 15
    assert [row["success"] for row in stats.trajectories(store, success=False, limit=4)] == [False] * 4
    assert stats.trajectories(store, "another run") == []


def test_trajectory_tells_its_tokens_and_every_use(store: ReplayStore) -> None:
    most = stats.trajectories(store, sort=Sort.uses, limit=1)[0]
    answer = stats.trajectory(store, most["id"])
    json.dumps(answer, allow_nan=False)
    segment = answer["segments"][0]
    assert segment["token_ids"] == [5, 6, 7, 8, 9, 10]
    assert segment["authors"] == ["template", "user", "llm", "llm", "env", "llm"]
    assert segment["loss_mask"] == [False, False, True, True, False, True]
    assert segment["behavior_log_probs"] == [None, None, -0.5, -1.0, None, -1.5]
    plain = sql(
        store,
        "select iteration, slot from draws where trajectory = ? and state = 'committed' order by 1, 2",
        most["id"],
    )
    assert [(use["iteration"], use["slot"]) for use in answer["uses"]] == plain
    assert len(plain) == most["uses"] >= 2
    assert answer["group"]["id"] == most["group"]
    assert answer["task"]["payload"] == '{"hops":2,"store":{"k1":"drawer"}}'
    assert [message["role"] for message in answer["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert answer["messages"][2]["tool_calls"] == [{"name": "lookup", "arguments": {"key": "k1"}, "id": "call-0"}]


def test_trajectory_is_found_by_the_beginning_of_its_id(location: Location) -> None:
    store = new_store(location)
    store.append([task()], [group()], [trajectory("abc1"), trajectory("abc2"), trajectory("%bc"), trajectory("abc2x")])
    assert stats.find(store, "abc1") == "abc1"
    assert stats.find(store, "%") == "%bc"
    for prefix, message in (
        ("zz", "got 'zz', which begins none"),
        ("abc", "got 'abc', which begins more than one: abc1, abc2, abc2x"),
        ("", "got '', which begins"),
        ("_", "begins none"),
        ("ABC1", "begins none"),
        ("' or 1=1 --", "begins none"),
    ):
        with pytest.raises(ReplayError, match=message):
            stats.find(store, prefix)


def test_whole_id_is_found_though_another_begins_with_it(location: Location) -> None:
    store = new_store(location)
    store.append([task()], [group()], [trajectory("abc"), trajectory("abcd")])
    assert stats.find(store, "abc") == "abc"


def test_corrupt_trajectory_is_told_and_not_shown(location: Location) -> None:
    store = new_store(location)
    store.append([task()], [group()], [trajectory("a")])
    sql(store, "update segments set tokens = ?", bytes(40))
    with pytest.raises(CorruptTrajectory, match="trajectory a must read back as it was written"):
        stats.trajectory(store, "a")


def test_iterations_and_metrics_come_in_order(store: ReplayStore) -> None:
    rows = stats.iterations(store, RUN)
    assert [(row["iteration"], row["fresh"], row["replay"]) for row in rows] == [
        (1, 8, 0),
        (2, 8, 3),
        (3, 8, 3),
        (4, 8, 3),
    ]
    assert stats.metric_series(store, RUN) == {"actor/grad_norm": [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]}


def test_metrics_that_are_no_numbers_leave_a_gap(location: Location) -> None:
    store = new_store(location)
    for iteration, value in enumerate([1.0, float("nan"), float("inf"), 4.0]):
        store.add_metrics(RUN, iteration, {"loss": value})
    assert stats.metric_series(store, RUN) == {"loss": [(0, 1.0), (3, 4.0)]}


def test_questions_of_one_run_leave_others_out(location: Location) -> None:
    store = new_store(location)
    store.add_run(run_record("run-2"))
    Born(1).append_to(store)
    Born(1, run="run-2").append_to(store)
    assert stats.summary(store)["trajectories"] == 8
    assert stats.summary(store, "run-2")["trajectories"] == 4
    assert {row["run"] for row in stats.trajectories(store, "run-2")} == {"run-2"}
    # run-2 has no policy: how stale its rows are is unknown, not 0.
    assert {row["staleness"] for row in stats.trajectories(store, "run-2")} == {None}


def test_stats_never_write(store: ReplayStore) -> None:
    tables = ("runs", "trajectories", "draws", "iterations", "metrics", "buffer_state")
    before = [sorted(sql(store, f"select * from {table}"), key=repr) for table in tables]
    stats.summary(store)
    stats.trajectories(store)
    assert [sorted(sql(store, f"select * from {table}"), key=repr) for table in tables] == before
