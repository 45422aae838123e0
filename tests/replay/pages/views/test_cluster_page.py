"""The page of a run that workers collect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from html import unescape

import pytest

from replay import ReplayStore
from replay.pages.app import create_app
from replay.questions.open_buffer import OpenBuffer
from replay.storage.collecting.fresh_groups import FreshRequest
from replay.storage.databases import Location
from tests.fakes.records import RUN, iteration_record, measured, new_store, policy, run_record, sql
from tests.replay.pages.serving import Served, served
from tests.replay.storage.collecting.episodes import claim, close, collect, issue

HERE = f"/runs/{RUN}/cluster"
LOOP = "run-2"
NAME = "<b>worker</b>\u202e'\""


@pytest.fixture
def writer(location: Location) -> Iterator[ReplayStore]:
    """A learner that waits for a second batch, with a worker, an engine and a run beside it that has neither."""
    with closing(new_store(location)) as store:
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
    reading = closing(ReplayStore.open(writer.path or writer.url, read_only=True))
    with reading as store, served(create_app(OpenBuffer(store, named="runs/one"))) as server:
        yield server


def page(inspector: Served, target: str = HERE) -> str:
    answer = inspector.ask(target)
    assert answer.status == 200, answer.text
    return answer.text


def words(html: str) -> str:
    """What is read of a page, its parts with a space between them."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html[html.index("<main") :])).split())


def test_page_begins_with_who_waits(inspector: Served) -> None:
    (text,) = re.findall(r'id="waits"[^>]*>(.*?)</p>', page(inspector), re.S)
    assert re.fullmatch(
        r"The learner waits for 2 of 2 groups of batch 2; the oldest episode was issued \d+ s ago and is with .*\.",
        words(f"<main>{text}"),
    )


def test_page_shows_that_nothing_is_lost(inspector: Served, writer: ReplayStore) -> None:
    assert "1 done = 1 fresh + 0 late + 0 unused + 0 waiting + 0 open ✓ adds up" in words(page(inspector))
    sql(writer, "update tickets set state = 'done' where number = 1")
    assert "3 done = 1 fresh + 0 late + 0 unused + 0 waiting + 0 open ✗ does not add up: 2 lost" in words(
        page(inspector)
    )


def test_page_shows_who_takes_part_and_what_is_unknown_as_a_dash(inspector: Served) -> None:
    text = words(page(inspector))
    assert "node-1 4711 – 1 2 – 3 – –" in text  # state, leases, in flight, at most, done, failed, tool errors
    assert "http://node-0:8801 serving 1 run-1@1 – 1.5e-05 –" in text
    assert "learner-1 , its lease holds for" in text
    assert "1 failed <i>no reply</i>" in text


def test_who_takes_part_can_write_no_html(inspector: Served) -> None:
    html = page(inspector)
    assert "<b>worker" not in html and "<i>no reply" not in html
    assert "&lt;b&gt;worker&lt;/b&gt;" in html
    assert "\u202e" not in re.sub(r'title="[^"]*"', "", html)


def test_page_says_what_would_help(inspector: Served, writer: ReplayStore) -> None:
    assert "Start one" not in page(inspector)
    sql(writer, "update workers set seen_at = seen_at - 80")
    html = page(inspector)
    assert "and no worker has reported for" in words(html)
    assert "agentloop worker --run RUN" in html


def test_only_runs_with_workers_lead_to_the_page(inspector: Served) -> None:
    assert f'href="{HERE}"' in page(inspector, f"/runs/{RUN}")
    html = page(inspector, f"/runs/{LOOP}")
    assert "/cluster" not in html
    assert "Collected by the training process itself" in html


def test_page_of_a_run_of_the_loop_is_one_line(inspector: Served) -> None:
    html = page(inspector, f"/runs/{LOOP}/cluster")
    assert "the training process collects by itself" in html
    assert "<table" not in html and "hx-get" not in html


def test_page_of_an_ended_run_no_longer_asks(inspector: Served, writer: ReplayStore) -> None:
    assert 'hx-trigger="every 3s"' in page(inspector)
    writer.roles.end_run(RUN)
    html = page(inspector)
    assert "hx-trigger" not in html and "The run has ended" in html


def test_page_of_an_unknown_run_says_so(inspector: Served) -> None:
    assert [inspector.ask(f"/runs/nobody{rest}").status for rest in ("", "/cluster", "/held-out")] == [404] * 3
