"""Settings of the next batch: changed, seen at once, and taken home as YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from agentloop.config import RunConfig
from tests.browser.demonstration import OTHER
from tests.fakes.runs import rows
from tests.replay.pages.serving import Served

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page


@pytest.fixture
def address(server: Served, run_folder: Path) -> str:
    (run,) = rows(run_folder / "replay.sqlite", f"select id from runs where id <> '{OTHER}'")[0]
    return f"{server.address}/mixing?run={run}"


def counts(page: Page) -> tuple[str, str]:
    """Fresh and replayed."""
    return page.locator(".value.fresh").inner_text(), page.locator(".value.replay").inner_text()


def set_fraction(page: Page, value: str) -> None:
    page.locator("#fraction").fill(value)
    page.keyboard.press("Tab")
    page.wait_for_url(f"**fraction={value}*")


def test_other_settings_make_another_batch_and_are_copied(page: Page, address: str, run_folder: Path) -> None:
    page.goto(address)
    assert counts(page) == ("8", "8")
    set_fraction(page, "0.75")
    # 0.75 of 16 are 12, and the 4 fresh ones are one group.
    page.locator(".value.replay", has_text="12").wait_for()
    assert page.get_by_role("status").inner_text() == "4 fresh, 12 replayed"
    page.locator("#sampler").select_option("recency")
    page.wait_for_url("**sampler=recency*")
    page.locator("#yaml", has_text="recency").wait_for()
    page.reload()
    page.wait_for_load_state("load")  # until its scripts listen
    assert counts(page) == ("4", "12")
    assert page.locator("#sampler").input_value() == "recency"
    # The settings are copied as YAML that a run takes.
    page.locator("#copy-yaml").click()
    page.get_by_role("button", name="copied").wait_for()
    copied = yaml.safe_load(page.evaluate("navigator.clipboard.readText()"))
    (config,) = rows(run_folder / "replay.sqlite", f"select config from runs where id <> '{OTHER}'")[0]
    whole = json.loads(config)
    for section, values in copied.items():
        whole[section] |= values
    assert RunConfig.model_validate(whole).replay.fraction == 0.75


@pytest.mark.parametrize("status", [503, None])
def test_no_old_batch_stands_beside_new_settings(context: BrowserContext, address: str, status: int | None) -> None:
    # Not one that is watched: a browser tells its console of what it could not fetch.
    page = context.new_page()
    page.goto(address)
    page.route("**/mixing?*", lambda route: route.abort() if status is None else route.fulfill(status=status, body=""))
    page.locator("#fraction").fill("0.25")
    page.keyboard.press("Tab")
    page.get_by_role("alert").filter(has_text="This could not be fetched.").wait_for()
    assert page.locator("#result .value").count() == 0
    page.unroute("**/mixing?*")
    set_fraction(page, "0.75")
    page.locator(".value.replay", has_text="12").wait_for()
    page.close()
