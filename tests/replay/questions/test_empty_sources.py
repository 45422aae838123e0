"""Which sources can give a run nothing, and what each sentence names."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from replay import Rows, Sampler, questions
from tests.fakes.records import RUN, FreshRows, add_run, new_store, sql

WINS = FreshRows(1, rates=(1.0,), run="wins", source="teacher")
"""A group of four successes from elsewhere, advantage 0.5 each."""


def said(tmp_path: Path, *rows: FreshRows, config: dict[str, Any] | None = None, **replay: Any) -> list[str]:
    """The sentences about a run of those `replay` settings, whose own rows and imported ones are `rows`."""
    store = new_store(tmp_path / "replay.sqlite")
    for part in rows:
        add_run(store, part.run)
        part.append_to(store)
    stored = {**(config or {}), "replay": {"fraction": 0.5, **replay}}
    sql(store, "update runs set config = ? where id = ?", json.dumps(stored), RUN)
    found = questions.empty_sources(store, RUN)
    store.close()
    return found


def test_a_source_that_no_row_has_is_named_with_the_one_that_was_meant(tmp_path: Path) -> None:
    sources = {"techer": 0.5, "self": 0.5}
    assert said(tmp_path, WINS, sources=sources) == [
        "source 'techer' can give nothing: no row has it, but rows have 'teacher'."
    ]


def test_a_source_that_is_still_to_come_is_named(tmp_path: Path) -> None:
    assert said(tmp_path, sources={"teacher": 1.0}) == [
        "source 'teacher' can give nothing: no row has it yet: import or attach some."
    ]
    assert said(tmp_path, attach={"earlier": "elsewhere"}) == [
        "source 'earlier' can give nothing: no row has it yet: import or attach some."
    ]


def test_rows_that_a_run_is_about_to_collect_are_not_missed(tmp_path: Path) -> None:
    hindsight = {"hindsight": {"enable": True}, "sources": {"self": 0.5, "hindsight": 0.5}}
    assert said(tmp_path, **hindsight) == []


@pytest.mark.parametrize(
    ("replay", "reason"),
    [
        ({"sources": {"self": 1.0}, "attach": {"teacher": "x"}}, "replay.sources leaves out the last of its 4 rows"),
        ({"unknown_staleness": "refuse"}, "replay.unknown_staleness leaves out the last of its 4 rows"),
        ({"sampler": "recency"}, "replay.sampler recency needs staleness, unknown of its 4 rows"),
        (
            {"unit": "group", "successful_only": False},
            "replay.unit group takes whole groups of 8, and its 4 rows make up none",
        ),
    ],
)
def test_what_leaves_out_all_rows_of_a_source_is_named(tmp_path: Path, replay: dict[str, Any], reason: str) -> None:
    assert said(tmp_path, WINS, **replay) == [f"source 'teacher' can give nothing: {reason}."]


def test_rows_without_a_success_are_left_out_by_that_key(tmp_path: Path) -> None:
    lost = FreshRows(1, rates=(0.0,), run="lost", source="teacher")
    reason = "replay.successful_only leaves out the last of its 4 rows"
    assert said(tmp_path, lost) == [f"source 'teacher' can give nothing: {reason}."]


def test_rows_that_the_sampler_gives_no_weight_are_left_out_by_it(tmp_path: Path) -> None:
    said(tmp_path, WINS)
    sql(tmp_path / "replay.sqlite", "update trajectories set advantage = 0")
    assert said(tmp_path) == [
        "source 'teacher' can give nothing: replay.sampler success gives none of its 4 rows a weight; uniform would."
    ]


def test_rows_of_other_tasks_can_not_be_members_of_a_runs_groups(tmp_path: Path) -> None:
    config = {"environment": {"task_pool": 4}, "batch": {"trajectories": 8, "group_size": 4}}
    own = FreshRows(1)
    assert said(tmp_path, own, WINS, config=config, unit="trajectory") == []
    sql(tmp_path / "replay.sqlite", "pragma foreign_keys = off")
    sql(tmp_path / "replay.sqlite", "update trajectories set task = 'another' where source = 'teacher'")
    assert said(tmp_path, config=config, unit="trajectory") == [
        "source 'teacher' can give nothing: replay.unit trajectory takes rows of tasks that the run collects, and none "
        "of its 4 rows is of one so far."
    ]


def test_a_source_that_can_give_something_is_not_named(tmp_path: Path) -> None:
    assert said(tmp_path, FreshRows(1), WINS) == []


class Never(Sampler):
    """A sampler of somebody's own."""

    def weights(self, rows: Rows) -> Any:
        return 0.0 * rows.reward


def test_a_sampler_of_ones_own_is_asked_where_it_is_given(tmp_path: Path) -> None:
    assert said(tmp_path, WINS, sampler="own.py:Never") == []
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        (sentence,) = questions.empty_sources(store, RUN, sampler=Never(0))
    assert sentence.startswith("source 'teacher' can give nothing: replay.sampler Never gives none of its 4 rows")
