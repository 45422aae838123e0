"""The list of trajectories: filtered, sorted and paged, by mouse and by keyboard, with all of it in the address."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from replay import questions
from tests.browser.demonstration import OTHER
from tests.fakes.records import iterated
from tests.fakes.runs import rows
from tests.replay.pages.serving import Served, inspecting

if TYPE_CHECKING:
    from playwright.sync_api import Page

LISTED = "[...document.querySelectorAll('table.list tbody tr')].map((row) => row.dataset.href.split('/').pop())"


@pytest.fixture(scope="module")
def run(run_folder: Path) -> str:
    (found,) = rows(run_folder / "replay.sqlite", f"select id from runs where id <> '{OTHER}'")[0]
    return str(found)


def counted(run_folder: Path, run: str, condition: str) -> int:
    query = f"select count(*) from trajectories where run = '{run}' and {condition}"
    return int(rows(run_folder / "replay.sqlite", query)[0][0])


def listed(page: Page) -> list[str]:
    """Ids, in order."""
    return list(page.evaluate(LISTED))


def wait_until_listed(page: Page, ids: list[str]) -> None:
    page.wait_for_function(f"(ids) => {LISTED}.join() === ids", arg=",".join(ids))


def open_buffer(page: Page, server: Served, run: str, more: str = "") -> None:
    page.goto(f"{server.address}/buffer?run={run}{more}")
    page.locator("#overview:not([aria-busy])").wait_for()


def test_conditions_filter_and_chips_and_bars_edit_them(page: Page, server: Served, run: str, run_folder: Path) -> None:
    open_buffer(page, server, run, "&limit=100")
    whole = listed(page)
    page.locator("#where").fill("reward >= 0.5")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**where=*")
    wanted = counted(run_folder, run, "reward >= 0.5")
    assert 0 < wanted == len(listed(page)) < len(whole) == counted(run_folder, run, "true")
    page.locator("#total", has_text=str(wanted)).wait_for()
    # After what can't be read, a keyboard stands in its field.
    page.locator("#where").fill("rewrd > 0.5")
    page.keyboard.press("Enter")
    page.locator("#where:focus").wait_for()
    page.get_by_label("Remove reward >= 0.5").click()
    page.wait_for_function("() => !location.search.includes('where=')")
    wait_until_listed(page, whole)
    bar = page.locator("#overview .spread", has_text="reward").locator("a").first
    count = int(bar.locator("title").inner_html().rpartition(" ")[2].replace(",", "") or 0)
    bar.click()
    page.wait_for_url("**where=*")
    assert len(listed(page)) == count > 0


def test_a_search_in_messages_goes_on_by_itself(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iterated(tmp_path / "replay.sqlite").close()  # 24 rows, searched in six parts
    monkeypatch.setattr(questions, "page", partial(questions.page, patience=questions.Patience(rows=4)))
    with inspecting(tmp_path / "replay.sqlite") as served:
        for word, found in (("key", "10 found on this page, 12 con"), ("nowhere", "0 found on this page, 24 con")):
            page.goto(f"{served.address}/buffer?where='{word}'+in+text&limit=10")
            page.locator("#onward", has_text=found).wait_for()
            assert len(listed(page)) == int(found.split(" ")[0])


def test_keys_walk_the_rows_and_what_is_reached_shows_that_it_is(page: Page, server: Served, run: str) -> None:
    # Pages are turned by keys, and back leads back.
    open_buffer(page, server, run, "&limit=20&sort=reward")
    first = listed(page)
    page.keyboard.press("n")
    page.wait_for_url("**after=*")
    assert not set(listed(page)) & set(first)
    page.go_back()
    wait_until_listed(page, first)
    open_buffer(page, server, run)
    ids = listed(page)
    for key in "jjjk":
        page.keyboard.press(key)
    assert page.locator("tr.at").get_attribute("data-href") == f"/trajectories/{ids[1]}"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/trajectories/{ids[1]}*")
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("m")
    page.wait_for_url("**/mixing*")
