import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from replay import ReplayError, ReplayStore, Rows, Sampler
from replay.config import StoredConfig, WrongSettings
from replay.mixing.request import DrawRequest, Limits, Pick
from replay.next_batch import as_yaml, changed, empty_sources, preview_with
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from tests.fakes.records import RUN, Fresh, add_run, iterated, new_store, set_state, sql


def before(store: ReplayStore, **given: Any) -> dict[str, Any]:
    return preview_with(store, RUN, **given)


def configure(location: Location, config: dict[str, Any]) -> None:
    sql(location, "update runs set config = ?", json.dumps(config))


@pytest.mark.parametrize(("unit", "rows"), [("any", 3), ("group", 8)])
def test_example_batch_is_what_the_next_draw_takes(location: Location, unit: str, rows: int) -> None:
    iterated(location).close()
    configure(location, {"batch": {"group_size": 4}})
    given = {"fraction": rows / 128, "successful_only": False, "sampler": "uniform", "unit": unit}
    with closing(ReplayStore.open(location, read_only=True)) as reader:
        answer = preview_with(reader, RUN, **given)
    picks = tuple(Pick(**pick) for pick in answer["plan"]["picks"])
    with closing(ReplayStore.open(location)) as store:
        sampler = make_sampler("uniform", 0)
        ((state,),) = sql(store, "select state from sampler_state where iteration = 3")
        sampler.load_state(json.loads(state))
        drawn = store.draw(DrawRequest(RUN, 4, 3, picks, limits=Limits(successful_only=False)), sampler)
    told = [(row["id"], row["probability"], row["staleness"]) for row in answer["batch"]["rows"]]
    assert told == [(row.trajectory.id, row.draw.probability, row.draw.staleness) for row in drawn]
    assert len(told) == rows


def test_rules_count_what_each_rule_leaves_out(tmp_path: Path) -> None:
    store = iterated(tmp_path / "replay.sqlite")
    # One of the 24 rows is quarantined. Of the 9 successes 3 are of policy 0, which is 3 publishes behind.
    ((damaged,),) = sql(store, "select id from trajectories where iteration = 3 and slot = 7")
    set_state(store, damaged, "quarantined")
    used = {row[0] for row in sql(store, "select trajectory from draws where stream = 'replay'")}
    answer = before(store, fraction=0.05, max_staleness=2, max_uses=1)
    rules = [(step["rule"], step["left"], step["out"]) for step in answer["rules"]]
    fit = sql(store, "select id from trajectories where cast(success as integer) = 1 and policy_version_min >= 1")
    unused = sum(id not in used for (id,) in fit)
    assert rules == [
        ("stored", 24, 0),
        ("eligible", 23, 1),
        ("allow_mismatch", 23, 0),
        ("context.max_tokens", 23, 0),
        ("iteration", 23, 0),
        ("successful_only", 9, 14),
        ("max_staleness", 6, 3),
        ("max_uses", unused, 6 - unused),
        ("sampler", unused, 0),
    ]


def test_staleness_is_counted_to_the_newest_iteration_where_no_policy_was_published(tmp_path: Path) -> None:
    store = iterated(tmp_path / "replay.sqlite")
    sql(store, "delete from policies")
    answer = before(store, fraction=0.05, max_staleness=2)
    assert answer["policy_version"] == 3
    assert ("max_staleness", 6, 3) in [(step["rule"], step["left"], step["out"]) for step in answer["rules"]]


def test_plan_tells_planned_and_achieved(three_iterations: ReplayStore) -> None:
    plan = before(three_iterations, fraction=0.25)["plan"]
    # A quarter of 128 is 32; 9 of the 24 rows are successes, and the sampler `success` weighs all of their groups.
    assert (plan["planned_replay"], plan["replay"], plan["shortfall"], plan["fresh"]) == (32, 9, 23, 119)
    observed = before(three_iterations, fraction=0.25, mode="observe")["plan"]
    assert (observed["observes"], observed["fresh"], observed["replay"]) == (True, 128, 9)
    nothing = before(three_iterations)
    assert (nothing["plan"]["replay"], nothing["batch"]["rows"]) == (0, [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fraction": 1.5}, "replay.fraction must be less than or equal to 1, got 1.5."),
        ({"fractoin": 0.5}, "replay.fractoin must be a known key, got an unknown one."),
    ],
)
def test_wrong_settings_are_refused_by_rule(three_iterations: ReplayStore, given: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongSettings) as raised:
        before(three_iterations, **given)
    assert message in str(raised.value)


def test_what_is_given_takes_the_place_of_what_is_stored() -> None:
    own = {"fraction": 0.5, "schedule": {"shape": "linear", "final": 0.0}, "sampler": "recency", "max_uses": 3}
    stored = StoredConfig.model_validate({"replay": own | {"sampler_options": {"half_life": 2.0}}})
    assert changed(stored, {}) == stored
    found = changed(stored, {"fraction": 0.25, "max_uses": None, "sampler_options": {"half_life": 4}}).replay
    assert (found.fraction, found.schedule.final, found.max_uses) == (0.25, 0.0, None)
    assert found.sampler_options == {"half_life": 4}
    # As YAML it is the part of a configuration that is no default.
    assert yaml.safe_load(as_yaml(found)) == {
        "replay": {
            "fraction": 0.25,
            "schedule": {"shape": "linear", "final": 0.0},
            "sampler": "recency",
            "sampler_options": {"half_life": 4},
        }
    }


def test_members_of_every_group_are_of_the_tasks_tried_longest_ago(tmp_path: Path) -> None:
    store = iterated(tmp_path / "replay.sqlite")
    # 16 groups of 2 replayed members. One task there is has 24 rows, which fill 12 groups; 99 others come before it.
    for pool, replay, new in ((1, 24, 0), (100, 0, 16)):
        configure(tmp_path / "replay.sqlite", {"environment": {"task_pool": pool}})
        answer = before(store, unit="trajectory", fraction=0.25, successful_only=False)
        named = ("planned_replay", "replay", "assumed_tasks", "new_tasks")
        assert [answer["plan"][name] for name in named] == [32, replay, 16, new]
        assert {row["task"] for row in answer["batch"]["rows"]} == ({"task-1"} if replay else set())


def test_what_a_run_was_stored_with_is_refused_where_no_batch_can_be_made_by_it(tmp_path: Path) -> None:
    store = iterated(tmp_path / "replay.sqlite", 1)
    refused = "configuration of run run-1 must be one of this agentloop, got one that another recorded: "
    for replay, message in (
        ({"wobble": 2}, rf"{refused}replay.wobble"),
        ({"unit": "trajectory"}, rf"{refused}environment.task_pool must be a number"),
        ({"sampler": "mine.py:Mine"}, "without running its file, got mine.py:Mine"),
    ):
        configure(tmp_path / "replay.sqlite", {"replay": {**replay, "fraction": 0.25}})
        with pytest.raises(ReplayError, match=message):
            before(store, successful_only=False)


def test_a_run_that_has_ended_has_the_fraction_of_the_end_of_its_schedule(tmp_path: Path) -> None:
    """As a resume with more iterations has it."""
    store = iterated(tmp_path / "replay.sqlite", 2)
    schedule = {"fraction": 0.5, "schedule": {"shape": "linear", "final": 0.0625}, "successful_only": False}
    for length, ended, places in ((2, True, [0.5, 0.0625, 0.0625]), (3, False, [0.5, 0.28125, 0.0625])):
        configure(tmp_path / "replay.sqlite", {"run": {"iterations": length}, "replay": schedule})
        answer = before(store)
        assert [each["fraction"] for each in answer["schedule"]] == places
        named = (answer["ended"], answer["iteration"], answer["plan"]["fraction"], answer["plan"]["replay"])
        assert named == (ended, 3, 0.0625, 8)


WINS = Fresh(1, rates=(1.0,), run="wins", source="teacher")
"""A group of four successes from elsewhere, advantage 0.5 each."""
LOST = Fresh(1, rates=(0.0,), run="lost", source="teacher")
TASKS = {"environment": {"task_pool": 4}, "batch": {"trajectories": 8, "group_size": 4}}


def said(tmp_path: Path, *rows: Fresh, config: dict[str, Any] | None = None, **replay: Any) -> list[str]:
    """The sentences about a run of those `replay` settings, whose own rows and imported ones are `rows`."""
    store = new_store(tmp_path / "replay.sqlite")
    for part in rows:
        add_run(store, part.run)
        part.append_to(store)
    stored = {**(config or {}), "replay": {"fraction": 0.5, **replay}}
    sql(store, "update runs set config = ? where id = ?", json.dumps(stored), RUN)
    found = empty_sources(store, RUN)
    store.close()
    return found


@pytest.mark.parametrize(
    ("rows", "replay", "source", "reason"),
    [
        ([WINS], {"sources": {"techer": 0.5, "self": 0.5}}, "techer", "no row has it, but rows have 'teacher'"),
        ([], {"sources": {"teacher": 1.0}}, "teacher", "no row has it yet: import or attach some"),
        ([], {"attach": {"earlier": "elsewhere"}}, "earlier", "no row has it yet: import or attach some"),
        ([WINS], {"sources": {"self": 1.0}, "attach": {"teacher": "x"}}, "teacher",
         "replay.sources leaves out the last of its 4 rows"),
        ([LOST], {}, "teacher", "replay.successful_only leaves out the last of its 4 rows"),
        ([WINS], {"sampler": "recency"}, "teacher",
         "replay.sampler recency needs staleness, unknown of its 4 rows"),
        ([WINS], {"unit": "group", "successful_only": False}, "teacher",
         "replay.unit group takes whole groups of 8, and its 4 rows make up none"),
    ],
)  # fmt: skip
def test_a_source_that_can_give_nothing_is_named_with_the_reason(
    tmp_path: Path, rows: list[Fresh], replay: dict[str, Any], source: str, reason: str
) -> None:
    assert said(tmp_path, *rows, **replay) == [f"source {source!r} can give nothing: {reason}."]


def test_a_source_that_can_give_something_or_is_still_to_be_collected_is_not_named(tmp_path: Path) -> None:
    assert said(tmp_path, hindsight={"enable": True}, sources={"self": 0.5, "hindsight": 0.5}) == []
    assert said(tmp_path, Fresh(1), WINS) == []
    assert said(tmp_path, config=TASKS, unit="trajectory") == []


def test_rows_without_a_weight_and_rows_of_other_tasks_are_named(tmp_path: Path) -> None:
    said(tmp_path, Fresh(1), WINS)
    sql(tmp_path / "replay.sqlite", "update trajectories set advantage = 0 where source = 'teacher'")
    reason = "replay.sampler success gives none of its 4 rows a weight; uniform would"
    assert said(tmp_path) == [f"source 'teacher' can give nothing: {reason}."]
    sql(tmp_path / "replay.sqlite", "update trajectories set advantage = 0.5")
    sql(tmp_path / "replay.sqlite", "update trajectories set task = 'another' where source = 'teacher'")
    reason = "replay.unit trajectory takes rows of tasks that the run collects, and none of its 4 rows is of one so far"
    assert said(tmp_path, config=TASKS, unit="trajectory") == [f"source 'teacher' can give nothing: {reason}."]


class Never(Sampler):
    def weights(self, rows: Rows) -> Any:
        return 0.0 * rows.reward


def test_a_sampler_of_ones_own_is_asked_where_it_is_given(tmp_path: Path) -> None:
    assert said(tmp_path, WINS, sampler="own.py:Never") == []
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        (sentence,) = empty_sources(store, RUN, sampler=Never(0))
    assert sentence.startswith("source 'teacher' can give nothing: replay.sampler Never gives none of its 4 rows")
