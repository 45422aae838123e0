"""The browser that tests drive by playwright; `make setup-browser` installs one where it may.

Playwright's own browsers are downloads and never used.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMED = "AGENTLOOP_TEST_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome")
WANTED = f"none of {', '.join(NAMES)} is on PATH; `make setup-browser` installs one, {NAMED} names another"
# As root there is no sandbox; and nothing of the browser's own may reach for the network.
_FLAGS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def found() -> str | None:
    """None where there is none."""
    return os.environ.get(NAMED) or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launched() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    executable = found()
    assert executable, WANTED
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_FLAGS))
        yield browser
        browser.close()
