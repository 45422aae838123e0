"""The page of one task."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

import pytest

from replay import ReplayStore, questions
from tests.fakes.records import RUN, FreshRows, new_store, run_record, sql, task
from tests.replay.pages.serving import Served, inspecting

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
def inspector(path: Path) -> Iterator[Served]:
    with inspecting(path) as server:
        yield server


def listed(html: str) -> list[str]:
    return re.findall(r'<tr data-href="/trajectories/([^"]+)">', html)


def titles(html: str) -> list[str]:
    return re.findall(r"<title>([^<]+)</title>", html)[1:]


def test_page_shows_success_by_policy_of_each_run_and_every_bucket(inspector: Served) -> None:
    html = inspector.page(HERE)
    by_policy = [(0, 1), (1, 2), (2, 4), (0, 2)]
    assert [title for title in titles(html) if title.startswith("policy")] == [
        f"policy {version}: {solved} of 4 attempts successful" for version, solved in by_policy
    ]
    buckets = [title.partition(",")[0] for title in titles(html) if " groups, " in title]
    assert buckets == [f"{solved} of 4: {groups} groups" for solved, groups in enumerate([0, 1, 2, 0, 1])]
    assert "in 2 runs" in html
    alone = inspector.page(f"{HERE}?run={RUN}")
    assert len([title for title in titles(alone) if title.startswith("policy")]) == 3
    assert 'href="/tasks/task-1?run=%2A"' in alone


def test_bars_of_buckets_lead_to_their_rows(inspector: Served, path: Path) -> None:
    links = re.findall(r'<a href="(/buffer\?[^"]+)"[^>]*><title>([124]) of 4', inspector.page(f"{HERE}?run={RUN}"))
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
        html = inspector.page(target)
        seen += listed(html)
        (target, *_) = [*re.findall(r'data-key="n" href="([^"#]+)#stored"', html), ""]
        target = target.replace("&amp;", "&")
    assert len(seen) == len(set(seen)) == 16


def test_a_task_nobody_tried_or_knows_says_so(inspector: Served) -> None:
    html = inspector.page("/tasks/task-2")
    assert "Never tried here" in html and listed(html) == []
    status, text = inspector.problem("/tasks/nothing")
    assert (status, "HASH must be the beginning of one task" in text) == (404, True)
    assert inspector.ask(f"{HERE}?after=nobody").status == 404
