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
LOST = FreshRows(1, rates=(0.0,), run="lost", source="teacher")
TASKS = {"environment": {"task_pool": 4}, "batch": {"trajectories": 8, "group_size": 4}}


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


@pytest.mark.parametrize(
    ("rows", "replay", "source", "reason"),
    [
        ([WINS], {"sources": {"techer": 0.5, "self": 0.5}}, "techer", "no row has it, but rows have 'teacher'"),
        ([], {"sources": {"teacher": 1.0}}, "teacher", "no row has it yet: import or attach some"),
        ([], {"attach": {"earlier": "elsewhere"}}, "earlier", "no row has it yet: import or attach some"),
        ([WINS], {"sources": {"self": 1.0}, "attach": {"teacher": "x"}}, "teacher",
         "replay.sources leaves out the last of its 4 rows"),
        ([WINS], {"unknown_staleness": "refuse"}, "teacher",
         "replay.unknown_staleness leaves out the last of its 4 rows"),
        ([LOST], {}, "teacher", "replay.successful_only leaves out the last of its 4 rows"),
        ([WINS], {"sampler": "recency"}, "teacher",
         "replay.sampler recency needs staleness, unknown of its 4 rows"),
        ([WINS], {"unit": "group", "successful_only": False}, "teacher",
         "replay.unit group takes whole groups of 8, and its 4 rows make up none"),
    ],
)  # fmt: skip
def test_a_source_that_can_give_nothing_is_named_with_the_reason(
    tmp_path: Path, rows: list[FreshRows], replay: dict[str, Any], source: str, reason: str
) -> None:
    assert said(tmp_path, *rows, **replay) == [f"source {source!r} can give nothing: {reason}."]


def test_a_source_that_can_give_something_or_is_still_to_be_collected_is_not_named(tmp_path: Path) -> None:
    assert said(tmp_path, hindsight={"enable": True}, sources={"self": 0.5, "hindsight": 0.5}) == []
    assert said(tmp_path, FreshRows(1), WINS) == []
    assert said(tmp_path, config=TASKS, unit="trajectory") == []


def test_rows_without_a_weight_and_rows_of_other_tasks_are_named(tmp_path: Path) -> None:
    said(tmp_path, FreshRows(1), WINS)
    sql(tmp_path / "replay.sqlite", "update trajectories set advantage = 0 where source = 'teacher'")
    reason = "replay.sampler success gives none of its 4 rows a weight; uniform would"
    assert said(tmp_path) == [f"source 'teacher' can give nothing: {reason}."]
    sql(tmp_path / "replay.sqlite", "update trajectories set advantage = 0.5")
    sql(tmp_path / "replay.sqlite", "update trajectories set task = 'another' where source = 'teacher'")
    reason = "replay.unit trajectory takes rows of tasks that the run collects, and none of its 4 rows is of one so far"
    assert said(tmp_path, config=TASKS, unit="trajectory") == [f"source 'teacher' can give nothing: {reason}."]


class Never(Sampler):
    """A sampler of somebody's own."""

    def weights(self, rows: Rows) -> Any:
        return 0.0 * rows.reward


def test_a_sampler_of_ones_own_is_asked_where_it_is_given(tmp_path: Path) -> None:
    assert said(tmp_path, WINS, sampler="own.py:Never") == []
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        (sentence,) = questions.empty_sources(store, RUN, sampler=Never(0))
    assert sentence.startswith("source 'teacher' can give nothing: replay.sampler Never gives none of its 4 rows")
