"""Who is answered, with what headers; and that nothing is ever written."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from replay.inspector.app import create_app
from replay.inspector.server.guard import Guard, own_names
from tests.replay.inspector.addresses import missing_pages, page_addresses, twin_of
from tests.replay.inspector.conftest import TOKEN
from tests.replay.inspector.hostile import EMPTY, HOSTILE, MARK, PLAIN, RUN, TASK, hostile_buffer
from tests.replay.inspector.serving import Served, served

from replay import ReplayError, ReplayStore
from replay.queries.open_buffer import OpenBuffer
from replay.storage.databases import Location
from tests.fakes.records import group, task, trajectory

PAGES = page_addresses((RUN, EMPTY), TASK, [HOSTILE, PLAIN], held_out=TASK)
TWINS = [twin_of(page) for page in PAGES]
FILES = ["/static/style.css", "/static/inspector.js", "/static/vendor/htmx.min.js"]
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def test_every_page_is_among_those_asked_here() -> None:
    assert missing_pages(PAGES) == []


# Who is answered


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
@pytest.mark.parametrize("port", ["", ":{port}", ":1"])
def test_names_of_this_machine_are_answered(inspector: Served, name: str, port: str) -> None:
    assert inspector.ask("/buffer", hosts=[name + port.format(port=inspector.port)]).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil",
        "localhost.evil:{port}",
        "127.0.0.1.evil.example:{port}",
        "127.0.0.1.nip.io",
        "127.0.0.2",
        "0.0.0.0:{port}",
        "[::]:{port}",
        "[::1].evil",
        "[::1",
        "::1:{port}",
        "127.1",
        "2130706433",
        "0x7f000001",
        "localhost@evil.example",
        "evil.example@localhost",
        "localhost:{port}:{port}",
        "localhost:port",
        "localhost/evil.example",
        "localhost?",
        "localhost#",
        "local host",
        ":{port}",
        "",
    ],
)
def test_foreign_hosts_are_refused(inspector: Served, host: str) -> None:
    assert inspector.ask("/buffer", hosts=[host.format(port=inspector.port)]).status == 400
    assert inspector.ask("/static/style.css", hosts=[host.format(port=inspector.port)]).status == 400


def test_a_request_with_no_host_or_two_is_refused(inspector: Served) -> None:
    for hosts in ([], ["localhost", "evil.example"], ["evil.example", "localhost"], ["localhost", "localhost"]):
        assert inspector.ask("/buffer", hosts=hosts).status == 400, hosts


def test_an_absolute_target_takes_no_part_in_who_is_asked(inspector: Served) -> None:
    assert inspector.ask("http://localhost/buffer", hosts=["evil.example"]).status == 400
    there = inspector.ask("http://evil.example/buffer")
    assert (there.status, "evil.example" in there.text) == (404, False)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "get"])
def test_only_get_and_head_are_answered(inspector: Served, method: str) -> None:
    for target in ("/buffer", "/buffer.json", "/static/style.css", "/nowhere"):
        response = inspector.ask(target, method=method, headers=[("Content-Length", "0")])
        assert response.status == 405, target
        assert response.header("allow") == "GET, HEAD"


def test_head_has_the_headers_of_get_and_no_body(inspector: Served) -> None:
    for target in ("/buffer", "/buffer.json", "/static/style.css"):
        head = inspector.ask(target, method="HEAD")
        assert (head.status, head.body) == (200, b""), target
        assert head.header("content-length") == str(len(inspector.ask(target).body))


@pytest.mark.parametrize(
    "headers",
    [
        [("Origin", "http://evil.example")],
        [("Origin", "null")],
        [("Origin", "")],
        [("Origin", "http://[bad")],
        [("Origin", "http://127.0.0.1:1")],
        [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "no-cors")],
        [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "cors")],
        [("Sec-Fetch-Site", "cross-site")],
        [("Sec-Fetch-Site", "same-site"), ("Sec-Fetch-Mode", "cors")],
        [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "iframe")],
        [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "object")],
    ],
)
def test_requests_of_other_sites_are_refused(inspector: Served, headers: list[tuple[str, str]]) -> None:
    for target in ("/buffer", "/buffer.json", "/static/inspector.js"):
        assert inspector.ask(target, headers=headers).status == 403, target


def test_requests_of_its_own_pages_and_of_people_are_answered(inspector: Served) -> None:
    own = [("Origin", inspector.address), ("Sec-Fetch-Site", "same-origin"), ("Sec-Fetch-Mode", "cors")]
    typed = [("Sec-Fetch-Site", "none"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")]
    followed = [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")]
    for headers in (own, typed, followed):
        assert inspector.ask("/buffer", headers=headers).status == 200


# The token


def test_nothing_is_answered_without_the_token(locked_inspector: Served) -> None:
    for target in [*PAGES, *TWINS, *FILES, "/nowhere", "/static/../app.py"]:
        response = locked_inspector.ask(target)
        assert response.status == 401, target
        assert MARK not in response.text


@pytest.mark.parametrize(
    "given", ["", "a", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), TOKEN.replace("-", "%2D ")[:-1], "\xe9", "None", "auto"]
)
def test_another_token_is_refused(locked_inspector: Served, given: str) -> None:
    quoted = given.replace(" ", "%20").replace("\xe9", "%E9")
    assert locked_inspector.ask(f"/buffer?token={quoted}").status == 401
    assert locked_inspector.ask("/buffer", headers=_cookie(locked_inspector.port, given)).status == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address(locked_inspector: Served) -> None:
    response = locked_inspector.ask(f"/buffer?sort=reward&token={TOKEN}&where=turns%3E0")
    assert (response.status, response.header("location")) == (303, "/buffer?sort=reward&where=turns%3E0")
    cookie = response.header("set-cookie")
    assert cookie is not None
    name, *rules = cookie.split("; ")
    assert {rule.lower() for rule in rules} >= {"httponly", "samesite=lax"}
    assert locked_inspector.ask("/buffer.json", headers=[("Cookie", name)]).status == 200
    assert locked_inspector.ask(FILES[0], headers=[("Cookie", f"theirs=1; {name}")]).status == 200


@pytest.mark.parametrize(
    "path", ["//evil.example", "/\\evil.example", "/%5cevil.example", "/%2f%2fevil.example", "/%09/x"]
)
def test_the_token_sends_nobody_to_another_site(locked_inspector: Served, path: str) -> None:
    location = locked_inspector.ask(f"{path}?token={TOKEN}").header("location")
    assert location is None or (location[0] == "/" and location[1] not in "/\\")


def test_the_token_is_on_no_page(locked_inspector: Served) -> None:
    for target in [*PAGES, *TWINS, "/nowhere"]:
        response = locked_inspector.ask(target, headers=_cookie(locked_inspector.port))
        assert TOKEN not in response.text and not any(TOKEN in value for _, value in response.headers)


def test_a_token_lets_in_who_asks_for_an_address_and_nobody_else(locked_inspector: Served) -> None:
    own = socket.gethostname()
    for host, status in [("192.168.1.7:7717", 200), ("[fe80::1]:7717", 200), (own, 200), ("evil.example", 400)]:
        cookie = _cookie(host.rpartition("]")[2].partition(":")[2])
        assert locked_inspector.ask("/buffer", hosts=[host], headers=cookie).status == status, host
    assert locked_inspector.ask("/buffer", hosts=["0.0.0.0"], headers=_cookie("")).status == 400


def test_cookies_of_other_programs_of_this_machine_do_no_harm(locked_inspector: Served) -> None:
    (mine,) = _cookie(locked_inspector.port)
    for others in ('seen={"pages": [1, 2]}; ', "flag; ", "a[b]=1; ", 'open="; ', "agentloop_inspector_1=theirs; "):
        assert locked_inspector.ask("/buffer", headers=[("Cookie", others + mine[1])]).status == 200, others
    # An inspector of the same host has its own port, and its own token.
    assert locked_inspector.ask("/buffer", headers=_cookie(locked_inspector.port + 1)).status == 401


def test_foreign_names_ask_a_name_server_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("socket.getfqdn", lambda: (asked.append("own"), "me.example")[1])
    own_names.cache_clear()
    listening = Guard(TOKEN, "0.0.0.0")
    assert [listening.names(name) for name in ("evil.example", "me.example", "other.example")] == [False, True, False]
    assert asked == ["own"]
    own_names.cache_clear()


def _cookie(port: int | str, token: str = TOKEN) -> list[tuple[str, str]]:
    return [("Cookie", f"agentloop_inspector_{port}={token}")]


# What every answer carries


def test_every_answer_carries_the_headers(inspector: Served, locked_inspector: Served) -> None:
    asked = [inspector.ask(target) for target in [*PAGES, *TWINS, *FILES, "/nowhere", "/buffer?sort=no", "/buffer/"]]
    asked += [
        inspector.ask("/buffer", hosts=["evil.example"]),
        inspector.ask("/buffer", method="POST"),
        inspector.ask("/buffer", headers=[("Origin", "null")]),
        locked_inspector.ask("/buffer"),
        locked_inspector.ask(f"/buffer?token={TOKEN}"),
    ]
    assert {response.status for response in asked} >= {200, 303, 400, 401, 403, 404, 405}
    for response in asked:
        assert {name: response.header(name) for name in HEADERS} == HEADERS, response.status
        assert response.header("server") is None


def test_pages_have_no_script_style_or_handler_that_the_policy_forbids(inspector: Served) -> None:
    for target in PAGES:
        text = inspector.ask(target).text
        for opening in text.split("<script")[1:]:
            attributes = opening[: opening.index(">")]
            # Data for a script is no script.
            assert "src=" in attributes or 'type="application/json"' in attributes, (target, attributes)
        assert "<style" not in text and " style=" not in text, target
        assert "javascript:" not in text.replace("javascript:alert", ""), target


# What is never done


def open_source(location: Location) -> ReplayStore:
    hostile_buffer(location).close()
    return ReplayStore.open(location, read_only=True)


def test_nothing_can_be_written_through_a_source(location: Location) -> None:
    store = open_source(location)
    writes: list[Callable[[], object]] = [
        lambda: store.append([task()], [group()], [trajectory("new")]),
        lambda: store.quarantine({PLAIN: "no reason"}),
    ]
    for write in writes:
        with pytest.raises((ReplayError, sa.exc.DBAPIError)):
            write()
    for statement in ("delete from trajectories", "create table x (y integer)", "update runs set name = 'x'"):
        with store.reading() as connection, pytest.raises(sa.exc.DBAPIError, match=r"read-?only|readonly"):
            connection.execute(sa.text(statement))
    store.close()


def test_a_whole_visit_changes_no_byte_of_the_database(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    store = open_source(path)
    before = path.read_bytes()
    with served(create_app(OpenBuffer(store), Guard())) as server:
        for target in [*PAGES, *TWINS]:
            assert server.ask(target).status < 500
    store.close()
    assert path.read_bytes() == before
