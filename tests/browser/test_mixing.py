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

TRAJECTORIES = 16
"""Of the demonstration's batches, half of them replayed."""


@pytest.fixture
def mixing(page: Page, server: Served, run_folder: Path) -> Page:
    (run,) = rows(run_folder / "replay.sqlite", f"select id from runs where id <> '{OTHER}'")[0]
    page.goto(f"{server.address}/mixing?run={run}")
    return page


def counts(page: Page) -> tuple[str, str]:
    """Fresh and replayed."""
    return page.locator(".value.fresh").inner_text(), page.locator(".value.replay").inner_text()


def set_fraction(page: Page, value: str) -> None:
    page.locator("#fraction").fill(value)
    page.keyboard.press("Tab")
    page.wait_for_url(f"**fraction={value}*")


def test_other_settings_make_another_batch_and_are_copied(mixing: Page, run_folder: Path) -> None:
    assert counts(mixing) == ("8", "8")
    set_fraction(mixing, "0.75")
    # 0.75 of 16 are 12, and the 4 fresh ones are one group.
    mixing.locator(".value.replay", has_text="12").wait_for()
    assert counts(mixing) == ("4", "12")
    assert mixing.get_by_role("status").inner_text() == "4 fresh, 12 replayed"
    mixing.locator("#sampler").select_option("recency")
    mixing.wait_for_url("**sampler=recency*")
    mixing.locator("#yaml", has_text="recency").wait_for()
    mixing.reload()
    mixing.wait_for_load_state("load")  # until its scripts listen
    assert counts(mixing) == ("4", "12")
    assert mixing.locator("#sampler").input_value() == "recency"

    # The settings are copied as YAML that a run takes.
    mixing.locator("#copy-yaml").click()
    mixing.get_by_role("button", name="copied").wait_for()
    copied = yaml.safe_load(mixing.evaluate("navigator.clipboard.readText()"))
    assert copied["replay"]["fraction"] == 0.75
    (config,) = rows(run_folder / "replay.sqlite", f"select config from runs where id <> '{OTHER}'")[0]
    whole = json.loads(config)
    for section, values in copied.items():
        whole[section] |= values
    assert RunConfig.model_validate(whole).replay.fraction == 0.75


@pytest.mark.parametrize("status", [503, None])
def test_no_old_batch_stands_beside_settings_that_were_not_answered(
    context: BrowserContext, server: Served, run_folder: Path, status: int | None
) -> None:
    (run,) = rows(run_folder / "replay.sqlite", f"select id from runs where id <> '{OTHER}'")[0]
    # Not one that is watched: a browser tells its console of what it could not fetch.
    page = context.new_page()
    page.goto(f"{server.address}/mixing?run={run}")
    page.route("**/mixing?*", lambda route: route.abort() if status is None else route.fulfill(status=status, body=""))
    page.locator("#fraction").fill("0.25")
    page.keyboard.press("Tab")
    page.get_by_role("alert").filter(has_text="This could not be fetched.").wait_for()
    assert page.locator("#result .value").count() == 0
    page.unroute("**/mixing?*")
    set_fraction(page, "0.75")
    page.locator(".value.replay", has_text="12").wait_for()
    page.close()
