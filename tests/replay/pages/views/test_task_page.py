"""The page of one task."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

import pytest

from replay import ReplayStore, questions
from replay.pages.app import create_app
from replay.questions.open_buffer import OpenBuffer
from tests.fakes.records import RUN, FreshRows, new_store, run_record, sql, task
from tests.replay.pages.serving import Served, served

HERE = "/tasks/task-1"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task tried in three iterations, 1, 2 and 4 of 4 times with success, and once by another run."""
    path = tmp_path_factory.mktemp("tasks") / "replay.sqlite"
    with closing(new_store(path)) as store:
        for iteration, rate in ((1, 0.25), (2, 0.5), (3, 1.0)):
            FreshRows(iteration, rates=(rate,)).append_to(store)
        store.add_run(run_record("run-2"))
        FreshRows(1, rates=(0.5,), run="run-2").append_to(store)
        store.append([task("task-2")], [], [])
    return path


@pytest.fixture(scope="module")
def reader(path: Path) -> Iterator[ReplayStore]:
    with closing(ReplayStore.open(path, read_only=True)) as store:
        yield store


@pytest.fixture(scope="module")
def inspector(reader: ReplayStore) -> Iterator[Served]:
    with served(create_app(OpenBuffer(reader))) as server:
        yield server


def page(inspector: Served, target: str) -> str:
    answer = inspector.ask(target)
    assert answer.status == 200, answer.text
    return answer.text


def listed(html: str) -> list[str]:
    return re.findall(r'<tr data-href="/trajectories/([^"]+)">', html)


def titles(html: str) -> list[str]:
    return re.findall(r"<title>([^<]+)</title>", html)[1:]


def test_page_shows_success_by_policy_of_each_run_and_every_bucket(inspector: Served) -> None:
    html = page(inspector, HERE)
    assert [title for title in titles(html) if title.startswith("policy")] == [
        "policy 0: 1 of 4 attempts successful",
        "policy 1: 2 of 4 attempts successful",
        "policy 2: 4 of 4 attempts successful",
        "policy 0: 2 of 4 attempts successful",
    ]
    buckets = [title.partition(",")[0] for title in titles(html) if " groups, " in title]
    assert buckets == [
        "0 of 4: 0 groups",
        "1 of 4: 1 groups",
        "2 of 4: 2 groups",
        "3 of 4: 0 groups",
        "4 of 4: 1 groups",
    ]
    assert "in 2 runs" in html
    alone = page(inspector, f"{HERE}?run={RUN}")
    assert len([title for title in titles(alone) if title.startswith("policy")]) == 3
    assert 'href="/tasks/task-1?run=%2A"' in alone


def test_bars_of_buckets_lead_to_their_rows(inspector: Served, path: Path) -> None:
    html = page(inspector, f"{HERE}?run={RUN}")
    links = re.findall(r'<a href="(/buffer\?[^"]+)"[^>]*><title>([124]) of 4', html)
    assert len(links) == 3
    for link, solved in links:
        conditions = [unquote(part) for part in re.findall(r"where=([^&]+)", link)]
        with closing(ReplayStore.open(path, read_only=True)) as store:
            ids = {row["id"] for row in questions.page(store, questions.Query(RUN, conditions), limit=500)["rows"]}
        plain = """select t.id from trajectories t join groups g on g.id = t.group_id
                   where t.run = ? and round(g.success_rate * 4) = ?"""
        assert ids == {id for (id,) in sql(path, plain, RUN, int(solved))}


def test_trajectories_come_page_by_page_under_addresses_of_their_own(inspector: Served) -> None:
    seen, target = [], f"{HERE}?limit=6"
    while target:
        html = page(inspector, target)
        seen += listed(html)
        (target, *_) = [*re.findall(r'data-key="n" href="([^"#]+)#stored"', html), ""]
        target = target.replace("&amp;", "&")
    assert len(seen) == len(set(seen)) == 16


def test_a_task_nobody_tried_says_so(inspector: Served) -> None:
    html = page(inspector, "/tasks/task-2")
    assert "Never tried here" in html
    assert listed(html) == []


def test_an_unknown_task_is_one_line(inspector: Served) -> None:
    answer = inspector.ask("/tasks/nothing")
    assert (answer.status, "HASH must be the beginning of one task" in answer.text) == (404, True)
    assert inspector.ask(f"{HERE}?after=nobody").status == 404
