"""What the next batch would be: against the draw that is then made, and by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from replay import ReplayError, ReplayStore
from replay.config import StoredConfig
from replay.mixing.request import DrawRequest, Limits, Pick
from replay.questions.preview_settings import WrongSettings, changed
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from tests.fakes.records import RUN, iterate, new_store, set_state, sql
from tests.fakes.replay_command import preview_of

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
def three_iterations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    """Three such iterations, to be read only."""
    path = tmp_path_factory.mktemp("run") / "replay.sqlite"
    lived(path).close()
    with closing(ReplayStore.open(path, read_only=True)) as reader:
        yield reader


def before(store: ReplayStore, **given: str) -> dict[str, Any]:
    return preview_of(store, RUN, given)


def configure(location: Location, config: dict[str, Any]) -> None:
    """As if the run had been started so."""
    sql(location, "update runs set config = ?", json.dumps(config))


@pytest.mark.parametrize(("unit", "rows"), [("any", 3), ("group", 8)])
def test_example_batch_is_what_the_next_draw_takes(location: Location, unit: str, rows: int) -> None:
    lived(location).close()
    configure(location, {"batch": {"group_size": 4}})
    given = {"fraction": str(rows / 128), "successful_only": "false", "sampler": "uniform", "unit": unit}
    with closing(ReplayStore.open(location, read_only=True)) as reader:
        answer = preview_of(reader, RUN, given)
    picks = tuple(Pick(**pick) for pick in answer["plan"]["picks"])
    with closing(ReplayStore.open(location)) as store:
        sampler = make_sampler("uniform", 0)
        ((state,),) = sql(store, "select state from sampler_state where iteration = 3")
        sampler.load_state(json.loads(state))
        drawn = store.draw(DrawRequest(RUN, 4, 3, picks, limits=Limits()), sampler)
    told = [(row["id"], row["probability"], row["staleness"]) for row in answer["batch"]["rows"]]
    assert told == [(row.trajectory.id, row.draw.probability, row.draw.staleness) for row in drawn]
    assert len(told) == rows


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


def test_plan_tells_planned_and_achieved(three_iterations: ReplayStore) -> None:
    plan = before(three_iterations, fraction="0.25")["plan"]
    # A quarter of 128 is 32; 9 of the 24 rows are successes, and the sampler `success` weighs all of their groups.
    assert (plan["planned_replay"], plan["replay"], plan["shortfall"], plan["fresh"]) == (32, 9, 23, 119)
    observed = before(three_iterations, fraction="0.25", mode="observe")["plan"]
    assert (observed["observes"], observed["fresh"], observed["replay"]) == (True, 128, 9)
    nothing = before(three_iterations)
    assert (nothing["plan"]["replay"], nothing["batch"]["rows"]) == (0, [])


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
        ({"unit": "rows"}, "unit", "must be any, trajectory, task or group, got 'rows'"),
        ({"max_staleness": "-1"}, "max_staleness", "must be a whole number of at least 0 or null, got '-1'"),
        ({"sampler": "newest"}, "sampler", "must be a built-in sampler or path/to/file.py:ClassName, got 'newest'"),
        (
            {"sampler": "recency", "recency.half_life": "-2"},
            "sampler_options",
            "half_life must be greater than 0, got -2",
        ),
        ({"sampler": "entropy", "entropy.policy": "current"}, "sampler_options", "stored where no policy is loaded"),
        ({"sampler": "freshness", "freshness.options": "[" * 9000}, "sampler_options", "options must be an object"),
        ({"unit": "group"}, "successful_only", "must be false when replay.unit is group"),
        ({"unit": "group", "successful_only": "false", "sampler": "entropy"}, "sampler", "must weigh rows"),
        ({"unit": "trajectory"}, "unit", "environment.task_pool must be a number"),
    ],
)
def test_a_wrong_setting_is_told_beside_its_control(
    three_iterations: ReplayStore, given: dict[str, str], field: str, message: str
) -> None:
    with pytest.raises(WrongSettings) as raised:
        before(three_iterations, **given)
    assert list(raised.value.errors) == [field]
    assert message in raised.value.errors[field]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"batch": {"trajectories": "many"}}, "batch.trajectories"),
        ({"replay": {"wobble": 2}}, "replay.wobble"),
        ({"replay": {"unit": "trajectory"}}, "environment.task_pool must be a number"),
    ],
)
def test_a_stored_configuration_that_is_none_is_refused(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    configure(tmp_path / "replay.sqlite", config)
    with pytest.raises(ReplayError, match=f"configuration of run run-1 must be one that a run was started with.*{key}"):
        before(store, fraction="0.5")
    store.close()


def test_a_sampler_of_ones_own_is_not_run(tmp_path: Path) -> None:
    store = lived(tmp_path / "replay.sqlite", 1)
    configure(tmp_path / "replay.sqlite", {"replay": {"sampler": "mine.py:Mine"}})
    with pytest.raises(WrongSettings) as raised:
        before(store)
    assert "without running its file, got mine.py:Mine" in raised.value.errors["sampler"]
    assert before(store, sampler="uniform")["settings"]["sampler"] == "uniform"
    store.close()


def test_what_is_given_takes_the_place_of_what_is_stored() -> None:
    own = {"fraction": 0.5, "schedule": {"shape": "linear", "final": 0.0}, "sampler": "recency", "max_uses": 3}
    stored = StoredConfig.model_validate({"replay": own | {"sampler_options": {"half_life": 2.0}}})
    assert changed(stored, {}) == stored
    found = changed(stored, {"fraction": "0.25", "max_uses": "", "recency.half_life": "4"}).replay
    assert (found.fraction, found.schedule.final, found.max_uses) == (0.25, 0.0, None)
    assert found.sampler_options == {"half_life": 4}
    # Options are those of their sampler alone.
    assert changed(stored, {"sampler": "uniform", "recency.half_life": "4"}).replay.sampler_options == {}


def test_a_run_that_is_over_goes_on_by_its_fraction(tmp_path: Path) -> None:
    store = lived(tmp_path / "replay.sqlite", 2)
    schedule = {"fraction": 0.0625, "schedule": {"shape": "linear", "final": 0.0}, "successful_only": False}
    configure(tmp_path / "replay.sqlite", {"run": {"iterations": 2}, "replay": schedule})
    answer = before(store)
    assert (answer["plan"]["fraction"], answer["plan"]["replay"]) == (0.0625, 8)
    configure(tmp_path / "replay.sqlite", {"run": {"iterations": 3}, "replay": schedule})
    assert before(store)["plan"]["replay"] == 0
    store.close()


def test_spreads_are_shares_of_the_batch_and_of_the_buffer(three_iterations: ReplayStore) -> None:
    answer = before(three_iterations, **THREE, max_staleness="1", sampler="uniform")
    by_name = {spread["name"]: spread["bins"] for spread in answer["spreads"]}
    assert [(bin["label"], bin["rows"]) for bin in by_name["staleness"]] == [("1", 8), ("2-3", 16)]
    assert [bin["batch"] for bin in by_name["staleness"]] == [1.0, 0.0]
    # 2 + 1 of 8 rows succeed; groups of rates 0.5 and 0.25 are of one size.
    assert [(bin["label"], bin["buffer"]) for bin in by_name["reward"]] == [("0", 15 / 24), ("1", 9 / 24)]
    assert [(bin["label"], bin["buffer"]) for bin in by_name["difficulty"]] == [("0.25", 0.5), ("0.5", 0.5)]
