"""Debian's chromium, driven by playwright: where it is, and how it is started.

Playwright's own browsers are downloads and never used. AGENTLOOP_TEST_BROWSER names another executable.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

NAMED = "AGENTLOOP_TEST_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome")
# As root there is no sandbox; and nothing of the browser's own may reach for the network.
_FLAGS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def executable() -> str | None:
    """The browser to test with; None where there is none."""
    named = os.environ.get(NAMED)
    return named or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launched() -> Iterator[Browser]:
    found = executable()
    assert found, f"a browser must be on PATH, got none of {', '.join(NAMES)}. `make setup-browser` installs one."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(_FLAGS))
        yield browser
        browser.close()
