"""Settings of the next batch: tried by typing them, seen in the address, and taken home as YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from agentloop.config import RunConfig
from tests.browser.demonstration import OTHER
from tests.fakes.runs import rows
from tests.replay.pages.serving import Served

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_other_settings_make_another_batch_and_are_copied(page: Page, server: Served, run_folder: Path) -> None:
    ((run, config),) = rows(run_folder / "replay.sqlite", f"select id, config from runs where id <> '{OTHER}'")
    fresh, replayed = page.locator(".value.fresh"), page.locator(".value.replay")
    page.goto(f"{server.address}/mixing?run={run}")
    assert (fresh.inner_text(), replayed.inner_text()) == ("8", "8")
    page.locator("#set").fill("fraction=0.75 sampler=recency")
    page.keyboard.press("Enter")
    page.wait_for_url("**sampler%3Drecency*")
    # 0.75 of 16 are 12, and the 4 fresh ones are one group.
    assert (fresh.inner_text(), replayed.inner_text()) == ("4", "12")
    # The settings are copied as YAML that a run takes.
    page.locator("#copy-yaml").click()
    page.get_by_role("button", name="copied").wait_for()
    copied = yaml.safe_load(page.evaluate("navigator.clipboard.readText()"))
    whole = json.loads(config)
    whole["replay"] |= copied["replay"]
    assert RunConfig.model_validate(whole).replay.fraction == 0.75
