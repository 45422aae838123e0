"""Every page, in a real browser: it renders, fits, and can be read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.demonstration import OTHER
from tests.browser.legible import FAINT, NAMELESS
from tests.fakes.runs import rows
from tests.replay.pages import hostile
from tests.replay.pages.addresses import missing_pages, page_addresses
from tests.replay.pages.serving import Served

if TYPE_CHECKING:
    from playwright.sync_api import Page

SIZES = [(1280, 800), (390, 844)]


def demonstrated(run_folder: Path) -> list[str]:
    """Addresses of all pages of the demonstration."""
    database = run_folder / "replay.sqlite"
    (run,) = rows(database, f"select id from runs where id <> '{OTHER}'")[0]
    several = """select trajectory, task from segments join trajectories on trajectories.id = trajectory
        group by trajectory, task order by count(*) desc, trajectory limit 2"""
    (first, task), (second, _) = rows(database, several)
    ((held_out,),) = rows(database, "select task from held_out limit 1")
    return only_pages(page_addresses((run, OTHER), task, [first, second], held_out=held_out))


def only_pages(targets: list[str]) -> list[str]:
    """Without what scripts alone ask for."""
    return [target for target in targets if ".json" not in target]


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


def test_every_page_is_shown(run_folder: Path) -> None:
    assert [path for path in missing_pages(demonstrated(run_folder)) if ".json" not in path] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_render_fit_and_can_be_read(page: Page, server: Served, run_folder: Path, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    for target in demonstrated(run_folder):
        page.set_viewport_size({"width": 1280, "height": 800})
        answer = page.goto(server.address + target, wait_until="load")
        assert answer is not None and answer.status == 200, target
        assert page.locator("main h1").inner_text().strip(), target
        assert page.title().endswith("agentloop"), target
        for width, height in SIZES:
            page.set_viewport_size({"width": width, "height": height})
            assert fits(page), (target, width)
        assert page.evaluate(FAINT) == [], target
        assert page.evaluate(NAMELESS) == [], target


def test_hostile_text_makes_nothing_in_a_browser(page: Page, inspector: Served) -> None:
    ids = [hostile.HOSTILE, hostile.PLAIN]
    runs = (hostile.RUN, hostile.EMPTY)
    for target in only_pages(page_addresses(runs, hostile.TASK, ids, held_out=hostile.TASK)):
        page.goto(inspector.address + target, wait_until="load")
        assert (
            page.locator(f"{hostile.MARK}, img[src*={hostile.MARK}], svg[onload], form[action*=example]").count() == 0
        )
        assert page.evaluate("typeof window.hostile") == "undefined", target
        assert fits(page), target
