from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from replay import ReplayError, ReplayStore
from tests.fakes.records import put, trajectory
from tests.replay.pages.conftest import TOKEN
from tests.replay.pages.hostile import EMPTY, HOSTILE, MARK, PLAIN, RUN, TASK, hostile_buffer
from tests.replay.pages.serving import Served, inspecting, missing_pages, page_addresses

PAGES = page_addresses((RUN, EMPTY), TASK, [HOSTILE, PLAIN], held_out=TASK)
FILES = ["/static/style.css", "/static/inspector.js", "/static/vendor/htmx.min.js"]
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def test_every_page_is_among_those_asked_here() -> None:
    assert missing_pages(PAGES) == []


FOREIGN = [
    *("evil.example", "localhost.evil:{port}", "127.0.0.1.nip.io", "127.0.0.2", "0.0.0.0:{port}", "[::]:{port}"),
    *("[::1].evil", "127.1", "2130706433", "localhost@evil.example", "localhost/evil.example", "local host", ""),
]


def test_names_of_this_machine_are_answered_and_foreign_none_or_two_refused(inspector: Served) -> None:
    for host in ("127.0.0.1", "localhost:{port}", "[::1]:1"):
        assert inspector.ask("/buffer", hosts=[host.format(port=inspector.port)]).status == 200, host
    for host in FOREIGN:
        for target in ("/buffer", "/static/style.css"):
            assert inspector.ask(target, hosts=[host.format(port=inspector.port)]).status == 400, host
    assert inspector.ask("http://localhost/buffer", hosts=["evil.example"]).status == 400
    for hosts in ([], ["localhost", "evil.example"], ["evil.example", "localhost"]):
        assert inspector.ask("/buffer", hosts=hosts).status == 400, hosts


def test_only_get_and_head_are_answered(inspector: Served) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "get"):
        for target in ("/buffer", "/static/style.css"):
            assert inspector.ask(target, method=method, headers=[("Content-Length", "0")]).status == 405, method
    head = inspector.ask("/buffer", method="HEAD")
    assert (head.status, head.body) == (200, b"")


# The token


def cookie(port: int, token: str = TOKEN) -> list[tuple[str, str]]:
    return [("Cookie", f"theirs=1; agentloop_inspector_{port}={token}")]


def test_nothing_is_answered_without_the_token_or_with_another(locked_inspector: Served) -> None:
    for target in [*PAGES, *FILES, "/nowhere", "/static/../app.py"]:
        response = locked_inspector.ask(target)
        assert (response.status, MARK in response.text) == (401, False), target
    for given in ("", "a", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\xe9", "None"):
        assert locked_inspector.ask(f"/buffer?token={given.replace(chr(0xE9), '%E9')}").status == 401, given
        assert locked_inspector.ask("/buffer", headers=cookie(locked_inspector.port, given)).status == 401, given
    # An inspector of the same host has its own port, and its own token.
    assert locked_inspector.ask("/buffer", headers=cookie(locked_inspector.port + 1)).status == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address(locked_inspector: Served) -> None:
    response = locked_inspector.ask(f"/buffer?sort=reward&token={TOKEN}&where=num_turns%3E0")
    assert (response.status, response.header("location")) == (303, "/buffer?sort=reward&where=num_turns%3E0")
    name, *rules = str(response.header("set-cookie")).split("; ")
    assert {rule.lower() for rule in rules} >= {"httponly", "samesite=lax"}
    for target in ("/buffer", *FILES):
        assert locked_inspector.ask(target, headers=[("Cookie", f"theirs=1; {name}")]).status == 200


def test_the_token_is_on_no_page_and_sends_nobody_to_another_site(locked_inspector: Served) -> None:
    for path in ("//evil.example", "/\\evil.example", "/%5cevil.example", "/%2f%2fevil.example"):
        location = locked_inspector.ask(f"{path}?token={TOKEN}").header("location")
        assert location is None or (location[0] == "/" and location[1] not in "/\\"), path
    for target in [*PAGES, "/nowhere"]:
        response = locked_inspector.ask(target, headers=cookie(locked_inspector.port))
        assert TOKEN not in response.text and not any(TOKEN in value for _, value in response.headers)


# What every answer carries, and what is never done


def test_every_answer_carries_the_headers(inspector: Served, locked_inspector: Served) -> None:
    files = [*map(inspector.ask, FILES)]
    asked = [*files, *map(inspector.ask, [*PAGES, "/nowhere", "/buffer?sort=no"])]
    asked += [
        inspector.ask("/buffer", hosts=["evil.example"]),
        inspector.ask("/buffer", method="POST"),
        locked_inspector.ask("/buffer"),
        locked_inspector.ask(f"/buffer?token={TOKEN}"),
    ]
    assert {response.status for response in asked} >= {200, 303, 400, 401, 404, 405}
    for response in asked:
        # What agents said is kept nowhere; the pages' own files are, and differ in nothing else.
        kept = {"cache-control": "private, max-age=60"} if response in files else {}
        assert {name: response.header(name) for name in HEADERS} == HEADERS | kept, response.status
        assert response.header("server") is None


def test_nothing_can_be_written_and_a_whole_visit_changes_no_byte_of_the_database(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    hostile_buffer(path).close()
    before = path.read_bytes()
    with closing(ReplayStore.open(path, read_only=True)) as store:
        with pytest.raises((ReplayError, sa.exc.DBAPIError)):
            put(store, trajectory("new"))
        with store.reading() as connection, pytest.raises(sa.exc.DBAPIError, match=r"read-?only|readonly"):
            connection.execute(sa.text("update runs set name = 'x'"))
        with inspecting(store) as server:
            assert [server.ask(target).status for target in PAGES] == [200] * len(PAGES)
    assert path.read_bytes() == before
