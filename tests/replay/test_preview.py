"""What the next batch would be: against the draw that is then made, against a run that was recorded, and by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from context.authors import LLM, TEMPLATE, USER
from context.tokens.token_sequence import Segment
from replay import ReplayError, ReplayStore, queries
from replay.declared import completed
from replay.mixing.request import DrawRequest, Limits, Pick
from replay.queries.preview.expected_ess import Kind, Past, expected_ess, fitted_weights, past_weights, scored_weights
from replay.queries.preview.settings import choose
from replay.records import REPLAY, DrawRecord, Trajectory
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from tests.replay.asking import ask
from tests.replay.fakes import (
    RUN,
    Born,
    group,
    iterate,
    iteration_record,
    new_store,
    policy,
    run_record,
    set_state,
    sql,
    task,
    tokens,
    trajectory,
)

RECORDED = Path(__file__).with_name("recorded") / "drifting_run.csv"
THREE = {"fraction": str(3 / 128), "successful_only": "false"}
"""Three rows of the default batch."""


def lived(location: Location, iterations: int = 3, sampler: str = "uniform") -> ReplayStore:
    """8 fresh rows an iteration, 2 + 1 of them successes, and two drawn."""
    store = new_store(location)
    chooser = make_sampler(sampler, 3)
    for iteration in range(1, iterations + 1):
        iterate(store, iteration, chooser)
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    """Three such iterations, to be read only."""
    path = tmp_path_factory.mktemp("run") / "replay.sqlite"
    lived(path).close()
    with closing(ReplayStore.open(path, read_only=True)) as reader:
        yield reader


def before(store: ReplayStore, **given: str) -> dict[str, Any]:
    return queries.preview(store, RUN, given)


def configure(location: Location, config: dict[str, Any]) -> None:
    """As if the run had been started so."""
    sql(location, "update runs set config = ?", json.dumps(config))


@pytest.mark.parametrize(("unit", "rows"), [("any", 3), ("group", 8)])
def test_example_batch_is_what_the_next_draw_takes(location: Location, unit: str, rows: int) -> None:
    lived(location).close()
    configure(location, {"batch": {"group_size": 4}})
    given = {"fraction": str(rows / 128), "successful_only": "false", "sampler": "uniform", "unit": unit}
    with closing(ReplayStore.open(location, read_only=True)) as reader:
        answer = queries.preview(reader, RUN, given)
    picks = tuple(Pick(**pick) for pick in answer["plan"]["picks"])
    with closing(ReplayStore.open(location)) as store:
        sampler = make_sampler("uniform", 0)
        ((state,),) = sql(store, "select state from sampler_state where iteration = 3")
        sampler.load_state(json.loads(state))
        drawn = store.draw(DrawRequest(RUN, 4, 3, picks, limits=Limits()), sampler)
    told = [(row["id"], row["probability"], row["staleness"]) for row in answer["batch"]["rows"]]
    assert told == [(row.trajectory.id, row.draw.probability, row.draw.staleness) for row in drawn]
    assert len(told) == rows


def test_preview_takes_nothing(store: ReplayStore) -> None:
    tables = ("draws", "sampler_state", "trajectories", "iterations")
    stored = [sql(store, f"select * from {table} order by 1, 2") for table in tables]
    assert before(store, **THREE, sampler="uniform") == before(store, **THREE, sampler="uniform")
    assert [sql(store, f"select * from {table} order by 1, 2") for table in tables] == stored


def test_preview_follows_a_run_that_goes_on(tmp_path: Path) -> None:
    store = lived(tmp_path / "replay.sqlite", 2)
    with closing(ReplayStore.open(tmp_path / "replay.sqlite", read_only=True)) as reader:
        assert before(reader, **THREE)["funnel"][-1]["left"] == 16
        iterate(store, 3, make_sampler("uniform", 1))
        answer = before(reader, **THREE)
    assert (answer["iteration"], answer["policy_version"]) == (4, 3)
    assert answer["funnel"][-1]["left"] == 24
    store.close()


def test_rows_in_memory_are_those_of_the_run_that_was_asked_for_last(tmp_path: Path) -> None:
    store = lived(tmp_path / "replay.sqlite", 2)
    store.add_run(run_record("run-2"))
    first = before(store, **THREE)
    assert store.has_read(RUN)
    queries.preview(store, "run-2", THREE)
    assert (store.has_read(RUN), store.has_read("run-2")) == (False, True)
    assert before(store, **THREE) == first
    store.close()


def test_funnel_counts_what_each_rule_leaves_out(tmp_path: Path) -> None:
    store = lived(tmp_path / "replay.sqlite")
    # One of the 24 rows is quarantined. Of the 9 successes 3 are of policy 0, which is 3 publishes behind.
    ((damaged,),) = sql(store, "select id from trajectories where iteration = 3 and slot = 7")
    set_state(store, damaged, "quarantined")
    used = {row[0] for row in sql(store, "select trajectory from draws where stream = 'replay'")}
    answer = before(store, fraction="0.05", max_staleness="2", max_uses="1")
    rules = [(step["rule"], step["left"], step["out"]) for step in answer["funnel"]]
    fit = sql(store, "select id from trajectories where cast(success as integer) = 1 and policy_version_min >= 1")
    unused = sum(id not in used for (id,) in fit)
    assert rules == [
        ("stored", 24, 0),
        ("eligible", 23, 1),
        ("allow_mismatch", 23, 0),
        ("iteration", 23, 0),
        ("successful_only", 9, 14),
        ("max_staleness", 6, 3),
        ("max_uses", unused, 6 - unused),
        ("sampler", unused, 0),
    ]
    store.close()


def test_plan_tells_planned_and_achieved(store: ReplayStore) -> None:
    plan = before(store, fraction="0.25")["plan"]
    # A quarter of 128 is 32; 9 of the 24 rows are successes, and the sampler `success` weighs all of their groups.
    assert (plan["planned_replay"], plan["replay"], plan["shortfall"], plan["fresh"]) == (32, 9, 23, 119)
    observed = before(store, fraction="0.25", mode="observe")["plan"]
    assert (observed["observes"], observed["fresh"], observed["replay"]) == (True, 128, 9)
    nothing = before(store)
    assert (nothing["plan"]["replay"], nothing["batch"]["rows"], nothing["ess"]["value"]) == (0, [], None)


def test_a_starved_run_says_so_beside_the_fraction(tmp_path: Path) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    store.close()
    configure(tmp_path / "replay.sqlite", {"replay": {"shortfall": "error"}})
    with closing(ReplayStore.open(tmp_path / "replay.sqlite", read_only=True)) as reader:
        answer = before(reader, fraction="0.25")
    assert "got 0 of 32 rows in iteration 1" in answer["errors"]["fraction"]
    assert answer["plan"] is None


def test_members_of_every_group_are_of_the_tasks_tried_longest_ago(tmp_path: Path) -> None:
    store = lived(tmp_path / "replay.sqlite")
    configure(tmp_path / "replay.sqlite", {"environment": {"task_pool": 1}})
    answer = before(store, unit="trajectory", fraction="0.25", successful_only="false")
    # 16 groups of 2 replayed members; the one task there is has 24 rows, which fill 12 of the groups.
    assert (answer["plan"]["planned_replay"], answer["plan"]["replay"]) == (32, 24)
    assert (answer["plan"]["assumed_tasks"], answer["plan"]["new_tasks"]) == (16, 0)
    assert {row["task"] for row in answer["batch"]["rows"]} == {"task-1"}
    configure(tmp_path / "replay.sqlite", {"environment": {"task_pool": 100}})
    answer = before(store, unit="trajectory", fraction="0.25", successful_only="false")
    assert (answer["plan"]["replay"], answer["plan"]["new_tasks"]) == (0, 16)  # 99 tasks come before it does again
    store.close()


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"fraction": "1.5"}, "fraction", "replay.fraction must be a number from 0 to 1, got '1.5'."),
        ({"fraction": "nan"}, "fraction", "replay.fraction must be a number from 0 to 1, got 'nan'."),
        ({"unit": "rows"}, "unit", "must be one of any, trajectory, task, group, got 'rows'"),
        ({"max_staleness": "-1"}, "max_staleness", "must be a whole number of at least 0, or empty, got '-1'"),
        ({"max_uses": "0"}, "max_uses", "must be a whole number of at least 1, or empty, got '0'"),
        ({"successful_only": "maybe"}, "successful_only", "must be one of true, false, got 'maybe'"),
        ({"sampler": "newest"}, "sampler", "must be one of uniform, recency"),
        (
            {"sampler": "recency", "recency.half_life": "-2"},
            "sampler_options",
            "half_life must be greater than 0, got -2",
        ),
        ({"sampler": "recency", "recency.half": "2"}, "sampler_options", "Did you mean half_life?"),
        ({"sampler": "entropy", "entropy.policy": "current"}, "sampler_options", "no policy is loaded"),
        ({"sampler": "freshness", "freshness.options": "[" * 9000}, "sampler_options", "options must be an object"),
        ({"unit": "group"}, "successful_only", "must be false when replay.unit is group"),
        ({"unit": "group", "successful_only": "false", "sampler": "entropy"}, "sampler", "must weigh rows"),
        ({"unit": "trajectory"}, "unit", "environment.task_pool must be a number"),
        ({"unit": "task"}, "unit", "environment.task_pool must be a number"),
    ],
)
def test_a_wrong_setting_is_told_beside_its_control(
    store: ReplayStore, given: dict[str, str], field: str, message: str
) -> None:
    answer = before(store, **given)
    assert list(answer["errors"]) == [field]
    assert message in answer["errors"][field]
    assert answer["plan"] is None


@pytest.mark.parametrize("config", [{"batch": {"trajectories": "many"}}, {"replay": [1]}, {"replay": {"schedule": 3}}])
def test_a_stored_configuration_that_is_none_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    configure(tmp_path / "replay.sqlite", config)
    with pytest.raises(ReplayError, match="configuration of run run-1 must be one that a run was started with"):
        before(store, fraction="0.5")
    store.close()


def test_what_another_version_declared_is_kept() -> None:
    answer = choose(completed({"replay": {"schedule": {"wobble": 2}}}), {}, scheduled=0.5)
    assert "\n  schedule: {wobble: 2}\n" in answer.yaml


def test_a_sampler_of_ones_own_is_not_run() -> None:
    config = {"replay": {"sampler": "mine.py:Mine"}}
    answer = choose(completed(config), {}, scheduled=0.5)
    assert "without running its file, got mine.py:Mine" in answer.errors["sampler"]
    assert choose(completed(config), {"sampler": "uniform"}, scheduled=0.5).errors == {}


def test_spreads_are_shares_of_the_batch_and_of_the_buffer(store: ReplayStore) -> None:
    answer = before(store, **THREE, max_staleness="1", sampler="uniform")
    by_name = {spread["name"]: spread["bins"] for spread in answer["spreads"]}
    assert [(bin["label"], bin["rows"]) for bin in by_name["staleness"]] == [("0", 0), ("1", 8), ("2-3", 16)]
    assert [bin["batch"] for bin in by_name["staleness"]] == [0.0, 1.0, 0.0]
    # 2 + 1 of 8 rows succeed; groups of rates 0.5 and 0.25 are of one size.
    assert [(bin["label"], bin["buffer"]) for bin in by_name["reward"]] == [("0", 15 / 24), ("1", 9 / 24)]
    assert [(bin["label"], bin["buffer"]) for bin in by_name["difficulty"]] == [("0.25", 0.5), ("0.5", 0.5)]
    assert [(bin["label"], bin["batch"]) for bin in by_name["source"]] == [("self", 1.0)]


# --- expected ESS ---


def past(born: list[int], weight: list[float], *, success: bool = True) -> Past:
    size = len(born)
    return Past(np.array(born), np.array([RUN] * size), np.full(size, success), np.array(weight))


def test_shares_of_two_iterations_give_weights_that_agree() -> None:
    # Rows of kind 0 weigh 1 and of kind 1 weigh 3: shares 1/4 and 3/4 in one iteration, 1/7, 3/7 and 3/7 in another.
    share = np.array([1 / 4, 3 / 4, 1 / 7, 3 / 7, 3 / 7])
    weights = fitted_weights(np.array([1, 1, 2, 2, 2]), share, np.array([[0, 1, 0, 1, 1]]))
    assert weights / weights[0] == pytest.approx([1, 3, 1, 3, 3], rel=1e-6)


def test_expected_ess_by_hand() -> None:
    kinds = {"a": Kind(0, RUN, True), "b": Kind(8, RUN, True)}
    known = past([0, 8], [1.0, 3.0])
    random = np.random.default_rng(0)
    found = expected_ess([["a", "b"]], kinds, scored={}, past=known, version=10, random=random)
    assert found.value == pytest.approx(0.8)  # (1 + 3)^2 / (2 x (1 + 9))
    assert (found.low, found.high) == (found.value, found.value)
    assert (found.scored, found.estimated, found.unknown) == (0, 2, 0)
    # One row is exactly as good as one row.
    assert expected_ess([["b"]], kinds, scored={}, past=known, version=10, random=random).value == 1.0


def test_scored_rows_set_the_scale_of_the_others() -> None:
    kinds = {"a": Kind(0, RUN, True), "b": Kind(8, RUN, True), "c": Kind(0, RUN, True)}
    known = past([0, 8], [1.0, 3.0])
    random = np.random.default_rng(0)
    found = expected_ess([["a", "b"]], kinds, scored={"a": 0.5}, past=known, version=10, random=random)
    # a weighs 0.5 where rows like it have 1: so b weighs 1.5. (0.5 + 1.5)^2 / (2 x (0.25 + 2.25))
    assert found.value == pytest.approx(0.8)
    assert (found.scored, found.estimated) == (1, 1)
    all_scored = {"a": 0.5, "b": 0.5}
    assert expected_ess([["a", "b"]], kinds, scored=all_scored, past=known, version=10, random=random).value == 1.0


def test_nothing_is_expected_where_little_is_known() -> None:
    kinds = {"a": Kind(0, RUN, True), "b": Kind(0, RUN, False)}
    known, random = past([0], [1.0]), np.random.default_rng(0)
    found = expected_ess([["a", "b"]], kinds, scored={}, past=known, version=1, random=random)
    assert (found.value, found.low, found.estimated, found.unknown) == (None, None, 1, 1)
    # A scored row without one like it among the draws can't be put beside those that have.
    found = expected_ess([["a", "b"]], kinds, scored={"b": 2.0}, past=known, version=1, random=random)
    assert (found.value, found.scored, found.unknown) == (None, 1, 1)
    assert expected_ess([[]], {}, scored={}, past=past([], []), version=1, random=random).value is None


def test_scores_of_the_newest_policy_give_the_weight_itself(location: Location) -> None:
    store = new_store(location)
    born = Born(1, rates=(0.5,), size=2).append_to(store)
    ids = [row.id for row in born.trajectories]
    # Stored are -0.5, -1 and -1.5: drifts of 0.1, 0.3 and 0.2, which are 0.2 on average. -25 is clamped to -20.
    scores = np.array([np.nan, np.nan, -0.4, -0.7, np.nan, -1.3], np.float32)
    far = np.array([np.nan, np.nan, -25.5, -1.0, np.nan, -1.5], np.float32)
    store.add_policy(policy(1))
    store.add_scores(RUN, 1, {(ids[0], 0): scores, (ids[1], 0): far})
    with store.reading() as connection:
        found = scored_weights(connection, ids, run=RUN, version=1)
        assert found == {ids[0]: pytest.approx(math.exp(0.2)), ids[1]: pytest.approx(math.exp(-20 / 3))}
        assert scored_weights(connection, ids, run=RUN, version=2) == {}
    sql(store, "update token_scores set log_probs = ? where trajectory = ?", bytes(12), ids[1])
    with store.reading() as connection:
        assert set(scored_weights(connection, ids, run=RUN, version=1)) == {ids[0]}
    answer = queries.preview(store, RUN, {"fraction": str(2 / 128), "successful_only": "false", "sampler": "uniform"})
    store.close()
    assert answer["ess"]["scored"] == 0  # of iteration 1, which is still to come: nothing may be drawn


def recorded(location: Location) -> tuple[ReplayStore, dict[int, float]]:
    """The recorded draws in a database, and what each update logged."""
    draws: dict[int, list[DrawRecord]] = {}
    logged, born = dict[int, float](), dict[str, Trajectory]()
    for line in RECORDED.read_text().splitlines():
        values = [] if line.startswith("#") else line.split(",")
        if len(values) == 6:
            iteration, slot, version, success = (int(values[at]) for at in (0, 1, 3, 4))
            born[values[2]] = at_version(values[2], version, success=bool(success))
            draw = DrawRecord(RUN, iteration, slot, values[2], REPLAY, None, iteration - 1 - version)
            draws.setdefault(iteration, []).append(replace(draw, ess_share=float(values[5])))
        elif len(values) == 2:
            logged[int(values[0])] = float(values[1])
    store = new_store(location)
    store.append([task()], [group()], list(born.values()))
    for iteration, value in logged.items():
        store.reserve_fresh([replace(draw, ess_share=None) for draw in draws[iteration]])
        record = iteration_record(iteration, replay=len(draws[iteration]))
        record = replace(record, metrics={"actor/replay/ess_mean": value})
        store.commit(record, draws[iteration], sampler_state={})
        store.add_policy(policy(iteration))
    return store, logged


def at_version(id: str, version: int, *, success: bool) -> Trajectory:
    segment = Segment(tokens([5, 6, 7], [TEMPLATE, USER, LLM], version=version))
    return trajectory(id, segments=(segment,), success=success, reward=float(success))


def test_expected_ess_is_near_what_a_recorded_run_then_had(tmp_path: Path) -> None:
    """Of a run whose policy broke down, from two iterations later on: its ESS fell to 0.06 and came back to 0.8."""
    store, logged = recorded(tmp_path / "replay.sqlite")
    drawn: dict[int, dict[str, Kind]] = {}
    query = (
        "select d.iteration, d.trajectory, policy_version_min, success from draws d "
        "join trajectories t on t.id = d.trajectory where d.stream = 'replay'"
    )
    for iteration, id, version, success in sql(store, query):
        drawn.setdefault(iteration, {})[id] = Kind(version, RUN, bool(success))
    errors, inside = [], 0
    for iteration in range(7, 25):
        with store.reading() as connection:
            known = past_weights(connection, RUN, before=iteration)
        kinds, random = drawn[iteration], np.random.default_rng(0)
        found = expected_ess([list(kinds)] * 32, kinds, scored={}, past=known, version=iteration - 1, random=random)
        assert found.value is not None and found.low is not None and found.high is not None
        errors.append(abs(found.value - logged[iteration]))
        inside += found.low <= logged[iteration] <= found.high
    assert np.mean(errors) < 0.04 and max(errors) < 0.1
    assert inside >= 14  # of 18; nine tenths would be 16
    answer = queries.preview(store, RUN, {"fraction": "0.125", "successful_only": "false", "sampler": "uniform"})
    assert answer["ess_logged"] == {"iteration": 24, "value": logged[24]}
    assert answer["ess"]["value"] == pytest.approx(logged[24], abs=0.1)
    store.close()


def test_command_tells_what_the_question_answers(store: ReplayStore) -> None:
    asked = ("--fraction", "0.0234375", "--failed-too", "--sampler", "recency", "--option", "half_life=2")
    result = ask("preview", str(store.path), *asked, "--json")
    given = {**THREE, "sampler": "recency", "recency.half_life": "2"}
    assert (result.exit_code, json.loads(result.output)) == (0, before(store, **given))
    text = ask("preview", str(store.path), *asked).output
    assert "replayed      3 of 3 planned (2.3 % configured)" in text
    assert "expected ESS  " in text
    assert "sampler_options: {half_life: 2}" in text
    wrong = ask("preview", str(store.path), "--unit", "group")
    assert wrong.exit_code == 1
    assert "replay.successful_only must be false when replay.unit is group" in wrong.output
