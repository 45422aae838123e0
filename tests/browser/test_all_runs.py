"""A folder of runs: their curves in the same charts, and from the list into the pages of one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from replay.pages.app import create_folder_app
from replay.pages.opened_runs import OpenedRuns
from tests.replay.pages.serving import served

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_the_list_leads_into_a_run_whose_pages_work_below_its_address(page: Page, run_folder: Path) -> None:
    with closing(OpenedRuns(run_folder.parent)) as runs, served(create_folder_app(runs)) as server:
        page.goto(server.address)
        page.locator(".chart canvas").nth(2).wait_for()
        assert page.locator(".legend", has_text=run_folder.name).count() > 3
        # A mark does not lead away.
        page.locator(".mark-run svg").click()
        assert page.locator("input[name=show]").is_checked() is False
        page.locator("td", has_text="0.1.0").click()
        page.locator("#progress", has_text="finished").wait_for()
        below = f"{server.address}/in/{run_folder.name}"
        assert page.url.startswith(f"{below}/runs/")
        page.get_by_role("link", name="Buffer").click()
        page.locator("#overview:not([aria-busy])").wait_for()
        page.locator("#where").fill("success")
        page.keyboard.press("Enter")
        page.wait_for_url(f"{below}/buffer?*where=success*")
        page.get_by_role("link", name="Mixing").click()
        page.wait_for_url(f"{below}/mixing*")  # until its scripts listen to the form
        page.locator("select[name=unit]").select_option("group")
        page.wait_for_url("**unit=group*")
        assert page.url.startswith(f"{below}/mixing?")
        page.get_by_role("link", name="Runs").click()
        page.wait_for_url(f"{server.address}/*")
        assert page.get_by_role("heading", name="Runs in").count() == 1
        page.close()  # before its server ends
