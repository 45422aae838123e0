"""An inspector that really listens, in a thread of the tests; requests as they go over the wire; addresses to ask."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from html import unescape
from http.client import HTTPConnection
from typing import Any

from starlette.types import ASGIApp

from replay import ReplayStore
from replay.open_buffer import OpenBuffer
from replay.pages.addresses import address
from replay.pages.app import PAGES, create_app
from replay.pages.serve import quiet_server
from replay.storage.databases import Location
from tests.fakes.scripted_http import running


@dataclass(frozen=True)
class Response:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def header(self, name: str) -> str | None:
        found = [value for key, value in self.headers if key == name.lower()]
        assert len(found) <= 1, found
        return found[0] if found else None


@dataclass(frozen=True)
class Served:
    port: int

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"http://{self.host}"

    def ask(
        self,
        target: str,
        *,
        method: str = "GET",
        hosts: Sequence[str] | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> Response:
        """One request, its target and its headers exactly as given; `hosts`: its Host headers, ours if left out."""
        given = [("Host", host) for host in ([self.host] if hosts is None else hosts)]
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in [*given, *headers]:
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            found = tuple((name.lower(), value) for name, value in answer.getheaders())
            return Response(answer.status, found, answer.read())

    def page(self, target: str) -> str:
        """The HTML of a page; its status must be 200."""
        answer = self.ask(target)
        assert answer.status == 200, answer.text
        return answer.text

    def words(self, target: str) -> str:
        """The text of a page, its parts with a space between them."""
        html = self.page(target)
        return words_of(html[html.index("<main") :])

    def problem(self, target: str) -> tuple[int, str]:
        answer = self.ask(target)
        assert answer.status >= 400, answer.text
        return answer.status, unescape(answer.text)


def words_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def charts_of(html: str) -> dict[str, Any]:
    """The panels of a page by their keys, as its scripts draw them."""
    (text,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', html, re.S)
    found: dict[str, Any] = json.loads(text)
    return found


@contextmanager
def inspecting(buffer: ReplayStore | Location, *opened: Any, **more: Any) -> Iterator[Served]:
    """An inspector of a store, or of one that is opened for it to read; further arguments are those of OpenBuffer."""
    with ExitStack() as stack:
        if not isinstance(buffer, ReplayStore):
            buffer = stack.enter_context(closing(ReplayStore.open(buffer, read_only=True)))
        yield stack.enter_context(served(create_app(OpenBuffer(buffer, *opened, **more))))


@contextmanager
def served(app: ASGIApp) -> Iterator[Served]:
    """On a free port of 127.0.0.1, until the end of the block."""
    with running(quiet_server(app)) as port:
        yield Served(port)


def page_addresses(runs: tuple[str, str], task: str, ids: Sequence[str], *, held_out: str | None = None) -> list[str]:
    """Of each page at least one, about the first run; of a cluster and of all runs about both.

    `held_out`: a held-out task; None: there is none.
    """
    run = runs[0]
    return [
        "/?all=1",
        address("buffer"),
        address("buffer", run=run),
        address("buffer", "overview", run=run),
        address("runs", run),
        address("runs", run, "iterations", 1),
        address("runs", run, "held-out"),
        *([] if held_out is None else [address("runs", run, "held-out", held_out)]),
        *(address("runs", each, "cluster") for each in runs),
        *(address("trajectories", id) for id in ids),
        *(address("trajectories", id, view=view) for id in ids for view in ("tokens", "updates")),
        address("trajectories", ids[0], "tokens.json", first=1),
        address("tasks", task),
        address("tasks", run=run),
        address("outcomes", run=run),
        address("slices", run=run),
        address("slices", run=run, of="held-out"),
        address("runs", run, "replayed"),
        address("runs", run, "after-replay"),
        address("runs", run, "tools"),
        address("runs", run, "cost", price_hour=2.5),
        address("", all=1, show=list(runs)),
        address("differences", show=list(runs)),
        address("compared-tasks", show=list(runs)),
        address("mixing", run=run),
    ]


def missing_pages(targets: Iterable[str]) -> list[str]:
    paths = [target.partition("?")[0] for target in targets]
    patterns = {page.path: re.compile(re.sub(r"\{[^}]*\}", "[^/]+", page.path)) for page in PAGES}
    return [path for path, pattern in patterns.items() if not any(map(pattern.fullmatch, paths))]
