"""How many tests ran in a browser, or were skipped for want of one: the summary says so, whichever it was."""

from __future__ import annotations

import pytest

from tests.browser.executable import NAMED, NAMES, found

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
