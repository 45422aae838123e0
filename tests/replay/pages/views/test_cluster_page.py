"""The page of a run that workers collect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from replay import ReplayStore
from replay.storage.collecting.fresh_groups import FreshRequest
from tests.fakes.records import RUN, iteration_record, measured, new_store, policy, run_record, sql
from tests.replay.pages.serving import Served, inspecting, words_of
from tests.replay.storage.collecting.episodes import claim, close, collect, issue

HERE = f"/runs/{RUN}/cluster"
LOOP = "run-2"
NAME = "<b>worker</b>\u202e'\""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ReplayStore]:
    """A learner that waits for a second batch, with a worker, an engine and another run that has neither."""
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        store.add_run(replace(run_record(LOOP), config={"run": {"iterations": 4}}))
        store.roles.lead(RUN, "learner-1", lease_s=600.0)
        store.roles.report("worker", RUN, NAME, {"host": "node-1", "pid": 4711, "in_flight": 2, "done": 3})
        engine = {"state": "serving", "version": 1, "label": "run-1@1", "adapter": None, "difference": 1.5e-5}
        store.roles.report("engine", RUN, "http://node-0:8801", engine)
        issue(store, [0])
        store.tickets.fail(claim(store, NAME), "<i>no reply</i>")
        collect(store, 1)
        close(store, 0)
        drawn = store.tickets.draw_fresh(FreshRequest(RUN, 1, 1, 0, 2))
        records = measured([row.draw for row in drawn.rows if row.draw is not None])
        store.commit(iteration_record(1, replay=0), records, sampler_state={})
        store.add_policy(policy(1))
        issue(store, [1, 2], iteration=2)
        claim(store, NAME)
        yield store


@pytest.fixture
def inspector(writer: ReplayStore) -> Iterator[Served]:
    with inspecting(str(writer.path), named="runs/one") as server:
        yield server


def test_page_shows_who_waits_who_takes_part_and_whether_a_row_was_lost(inspector: Served, writer: ReplayStore) -> None:
    html = inspector.page(HERE)
    text = words_of(html)
    waits = r"The learner waits for 2 of 2 groups of batch 2; the oldest episode was issued \d+ s ago and is with "
    assert re.search(waits, text)
    for part in (
        "1 done = 1 fresh + 0 late + 0 unused + 0 waiting + 0 open ✓ adds up",
        "node-1 4711 – 1 2 – 3 – –",  # state, leases, in flight, at most, done, failed, tool errors
        "http://node-0:8801 serving 1 run-1@1 – 1.5e-05 –",
        "learner-1 , its lease holds for",
        "1 failed <i>no reply</i>",
    ):
        assert part in text, part
    assert "<b>worker" not in html and "&lt;b&gt;worker&lt;/b&gt;" in html
    sql(writer, "update tickets set state = 'done' where number = 1")
    assert "3 done = 1 fresh + 0 late + 0 unused + 0 waiting + 0 open ✗ does not add up: 2 lost" in inspector.words(
        HERE
    )


def test_page_says_what_would_help_and_no_longer_asks_once_the_run_has_ended(
    inspector: Served, writer: ReplayStore
) -> None:
    html = inspector.page(HERE)
    assert "Start one" not in html and 'hx-trigger="every 3s"' in html
    sql(writer, "update workers set seen_at = seen_at - 80")
    text = inspector.words(HERE)
    assert "and no worker has reported for" in text and "agentloop worker --run RUN" in text
    writer.roles.end_run(RUN)
    html = inspector.page(HERE)
    assert "hx-trigger" not in html and "The run has ended" in html


def test_only_runs_with_workers_have_the_page(inspector: Served) -> None:
    assert f'href="{HERE}"' in inspector.page(f"/runs/{RUN}")
    html = inspector.page(f"/runs/{LOOP}")
    assert "/cluster" not in html and "Collected by the training process itself" in html
    html = inspector.page(f"/runs/{LOOP}/cluster")
    assert "the training process collects by itself" in html
    assert "<table" not in html and "hx-get" not in html
