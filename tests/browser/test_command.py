"""`agentloop inspect` as people start it, from its printed address to the end."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fakes.processes import AGENTLOOP

if TYPE_CHECKING:
    from playwright.sync_api import Page


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
        page.close()  # before its server ends
    finally:
        inspector.send_signal(signal.SIGINT)
        _, errors = inspector.communicate(timeout=20)
    assert errors == ""
