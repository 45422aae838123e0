"""One browser, one recorded run and one server for all tests here; a page that lets no trouble pass."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from replay.open_buffer import open_buffer
from replay.pages.app import create_app
from tests.browser.executable import WANTED, found, launched
from tests.replay.pages.serving import Served, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page


@pytest.fixture(scope="session", autouse=True)
def _executable() -> None:
    if not found():
        pytest.skip(WANTED)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of the demonstration, recorded once for all workers. Nobody writes to it."""
    from tests.browser.demonstration import NAME, record

    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "demonstration"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            record(folder)
            (folder / "done").touch()
    return folder / "runs" / f"{NAME}-001"


@pytest.fixture(scope="session")
def server(run_folder: Path) -> Iterator[Served]:
    """An inspector of the demonstration."""
    with open_buffer(str(run_folder)) as source, served(create_app(source)) as inspector:
        yield inspector


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with launched() as started:
        yield started


@pytest.fixture(scope="package")
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(
        viewport={"width": 1280, "height": 800}, permissions=["clipboard-read", "clipboard-write"]
    )
    made.set_default_timeout(10_000)
    yield made
    made.close()


@dataclass
class Watched:
    """A page of the browser, and all that went wrong on it."""

    page: Page
    troubles: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """Addresses, in order."""

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("requestfailed", lambda request: self._note("failed", f"{request.url} {request.failure}"))

    def _note(self, kind: str, text: str) -> None:
        # A page that is left while it loads leaves requests behind.
        if kind in ("error", "warning", "assert", "failed") and not text.endswith("net::ERR_ABORTED"):
            self.troubles.append(f"{kind}: {text}")


@pytest.fixture
def watch(context: BrowserContext) -> Iterator[Callable[[], Watched]]:
    """Opens pages. None of them may have had a console error or asked another machine for anything."""
    opened: list[Watched] = []

    def open_page() -> Watched:
        opened.append(Watched(context.new_page()))
        return opened[-1]

    yield open_page
    for each in opened:
        each.page.close()
    assert [trouble for each in opened for trouble in each.troubles] == []
    here = ("http://127.0.0.1:", "data:", "blob:")
    assert [url for each in opened for url in each.requests if not url.startswith(here)] == []


@pytest.fixture
def page(watch: Callable[[], Watched]) -> Page:
    return watch().page
