"""The browser, driven by playwright, whose own browsers are downloads and never used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

from tests.browser.executable import NAMES, found

# As root there is no sandbox; and nothing of the browser's own may reach for the network.
_FLAGS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@contextmanager
def launched() -> Iterator[Browser]:
    executable = found()
    assert executable, f"a browser must be on PATH, got none of {', '.join(NAMES)}. `make setup-browser` installs one."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_FLAGS))
        yield browser
        browser.close()
