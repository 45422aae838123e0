"""`agentloop inspect` as people start it, from its printed address to the end."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route

from replay import ReplayStore
from replay.pages.app import create_app
from replay.queries.open_buffer import OpenBuffer
from tests.fakes.processes import AGENTLOOP
from tests.replay.pages.conftest import TOKEN
from tests.replay.pages.serving import served

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page


def test_the_printed_address_shows_the_run_and_its_token_leaves_the_address(page: Page, run_folder: Path) -> None:
    command = [AGENTLOOP, "inspect", run_folder, "--no-browser", "--port", "0", "--token", "auto"]
    inspector = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert inspector.stdout
        told = inspector.stdout.readline().split()[-1]
        assert told.startswith("http://127.0.0.1:") and "?token=" in told
        page.goto(told)
        assert "token" not in page.url
        page.get_by_role("link", name="Buffer").click()
        page.locator("#overview:not([aria-busy])").wait_for()
        assert page.locator("table.list tbody tr").count() > 10
        assert page.evaluate("document.cookie") == ""
        page.context.clear_cookies()
    finally:
        inspector.send_signal(signal.SIGINT)
        _, errors = inspector.communicate(timeout=20)
    assert errors == ""


def test_links_on_other_sites_open_what_they_name(context: BrowserContext, hostile_store: ReplayStore) -> None:
    with served(create_app(OpenBuffer(hostile_store), Guard(TOKEN))) as locked:
        links = [f"{locked.address}/buffer?token={TOKEN}", f"{locked.address}/buffer?sort=reward"]
        text = "".join(f'<a href="{link}">{number}</a>' for number, link in enumerate(links))
        # A name is another site than an address.
        with served(Starlette(routes=[Route("/", lambda _: HTMLResponse(text))])) as elsewhere:
            page = context.new_page()
            for number in ("0", "1"):
                page.goto(f"http://localhost:{elsewhere.port}/")
                page.get_by_role("link", name=number, exact=True).click()
                page.locator("table.list").wait_for()
                assert page.url.startswith(f"{locked.address}/buffer") and "token" not in page.url
            page.close()
    context.clear_cookies()
