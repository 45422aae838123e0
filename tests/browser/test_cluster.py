"""The page of a cluster goes on by itself while its run does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from replay import ReplayStore
from tests.fakes.records import RUN, new_store
from tests.replay.pages.serving import Served, inspecting
from tests.replay.storage.collecting.episodes import claim, issue

if TYPE_CHECKING:
    from playwright.sync_api import Page

HERE = f"/runs/{RUN}/cluster"


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ReplayStore]:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        store.roles.lead(RUN, "learner-1", lease_s=600.0)
        store.roles.report("worker", RUN, "worker-1", {"host": "node-1"})
        issue(store, [0])
        yield store


@pytest.fixture
def live(writer: ReplayStore) -> Iterator[Served]:
    assert writer.path is not None
    with inspecting(writer.path) as found:
        yield found


def says(page: Page, text: str) -> None:
    page.locator("#waits").filter(has_text=text).wait_for()


def test_page_follows_the_run_and_asks_no_more_once_it_has_ended(page: Page, writer: ReplayStore, live: Served) -> None:
    page.goto(live.address + HERE)
    says(page, "and no worker has claimed it")
    claim(writer, "worker-1")
    writer.roles.report("worker", RUN, "<img src=/x.png>", {"host": "<b>node</b>"})
    says(page, "is with worker-1")
    assert page.locator("td code").all_inner_texts() == ["worker-1", "<img src=/x.png>"]
    assert page.locator("main img, main b:text('node')").count() == 0
    writer.roles.end_run(RUN)
    says(page, "The run has ended")
    assert page.locator("#now").count() == 1 and page.locator("#now[hx-trigger]").count() == 0
