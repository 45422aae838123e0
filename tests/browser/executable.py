"""The browser that tests drive by playwright: found, or installed where this machine lets us; `make setup-browser`.

Playwright's own browsers are downloads and never used. As a plugin of pytest: how many tests ran in a browser, or were
skipped for want of one, is said in the summary.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.debian_packages import install

if TYPE_CHECKING:
    from playwright.sync_api import Browser

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


def found() -> str | None:
    """None where there is none."""
    return os.environ.get(NAMED) or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launched() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    executable = found()
    assert executable, f"a browser must be on PATH, got none of {', '.join(NAMES)}. `make setup-browser` installs one."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_FLAGS))
        yield browser
        browser.close()


_DRIVEN = "browser"
_counted = {"passed": 0, "failed": 0, "skipped": 0}
WANTED = f"none of {', '.join(NAMES)} is on PATH; `make setup-browser` installs one, {NAMED} names another"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and _DRIVEN in item.fixturenames:
        item.user_properties.append((_DRIVEN, found() or ""))
        if not found():
            pytest.skip(WANTED)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Reports reach the summary from every worker."""
    if (report.when == "call" or report.skipped) and _DRIVEN in dict(report.user_properties):
        _counted[report.outcome] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran = _counted["passed"] + _counted["failed"]
    if ran:
        terminalreporter.write_line(f"browser, with tests run in it: {found()} {ran}")
    if _counted["skipped"]:
        terminalreporter.write_line(f"no browser, with tests skipped: {_counted['skipped']} ({WANTED})")


def main() -> int:
    if there := found():
        print(f"browser: {there} is there; nothing was installed")
        return 0
    trouble = install("chromium")
    there = found()
    if there:
        print(f"browser: installed {there}")
        return 0
    reason = trouble or f"none of {', '.join(NAMES)} came of it"
    print(f"browser: could not be installed: {reason}. Install chromium, or name a browser with {NAMED}.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
