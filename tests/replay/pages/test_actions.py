"""What pages may write: labels and notes, by forms of their own alone."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from replay.open_buffer import open_buffer
from replay.pages.addresses import address
from replay.pages.app import create_app
from tests.fakes.records import RUN, new_store, put, sql, trajectory
from tests.replay.pages.conftest import TOKEN
from tests.replay.pages.serving import Served, inspecting, served

ONE = address("trajectories", "one")
RUN_PAGE = address("runs", RUN)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "replay.sqlite"
    with closing(new_store(path)) as store:
        put(store, trajectory("one"), trajectory("two", success=False))
    return path


@pytest.fixture
def writable(path: Path) -> Iterator[Served]:
    with open_buffer(str(path)) as source, served(create_app(source)) as server:
        yield server


def sent(server: Served, target: str, *, origin: str | None = "", cookie: str = "", **form: str) -> tuple[int, str]:
    """Status, and where to go on or what is wrong; as a page of the inspector sends it, unless `origin` is given."""
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Cookie": cookie}
    if origin is not None:
        headers["Origin"] = origin or server.address
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
        connection.request("POST", target, urlencode(form), headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("location") or answer.read().decode()


def test_a_form_of_which_a_part_arrives_is_no_failure_of_the_server(path: Path) -> None:
    got = [{"type": "http.request", "body": b"label=x", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return got.pop(0)

    async def send(message: Any) -> None:
        """Nobody is there any more."""

    headers = [(b"host", b"localhost"), (b"origin", b"http://localhost")]
    place = {"path": f"{ONE}/labels", "root_path": "", "query_string": b"", "headers": headers}
    with open_buffer(str(path)) as source:
        asyncio.run(create_app(source)({"type": "http", "method": "POST", **place}, receive, send))
    assert sql(path, "select count(*) from trajectory_labels") == [(0,)]


def test_a_trajectory_and_a_run_are_labelled_and_unlabelled(writable: Served, path: Path) -> None:
    for page, table in ((ONE, "trajectory_labels"), (RUN_PAGE, "run_labels")):
        given = {"label": " good ", "note": "<b>right</b>", "by": "ann"}
        assert sent(writable, f"{page}/labels", **given) == (303, f"{page}#labels")
        assert sql(path, f"select label, note, made_by from {table}") == [("good", "<b>right</b>", "ann")]
        assert "good <b>right</b> ann" in writable.words(page)
        sent(writable, f"{page}/labels", remove="good")
        assert "right" not in writable.words(page)
    status, problem = sent(writable, f"{ONE}/labels", label="")
    assert (status, "label must" in problem) == (400, True)
    assert sent(writable, address("trajectories", "none", "labels"), label="x")[0] == 404
    assert sent(writable, f"{ONE}/labels", label="x", note="n" * 70_000)[0] == 400


def test_forms_of_other_sites_and_programs_are_refused(writable: Served, path: Path) -> None:
    for origin in (None, "null", "http://evil.example", f"http://127.0.0.1:{writable.port + 1}"):
        assert sent(writable, f"{ONE}/labels", origin=origin, label="x")[0] == 403, origin
    with open_buffer(str(path)) as source, served(create_app(source, token=TOKEN, host="0.0.0.0")) as locked:
        assert sent(locked, f"{ONE}/labels", label="x")[0] == 401
        assert sent(locked, f"{ONE}/labels", label="x", cookie=f"agentloop_inspector_{locked.port}={TOKEN}")[0] == 303
    assert sql(path, "select label from trajectory_labels") == [("x",)]


def test_where_the_buffer_is_read_only_one_line_says_so(path: Path) -> None:
    with inspecting(path) as server:
        for page in (ONE, RUN_PAGE):
            assert ("is read only here" in server.words(page), 'method="post"' in server.page(page)) == (True, False)
        status, problem = sent(server, f"{ONE}/labels", label="x")
        assert (status, "got a read-only buffer" in problem) == (403, True)
