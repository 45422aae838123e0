"""Odd paths, wrong parameters, errors, and text that would like to be HTML: what they can't do."""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import unescape

import pytest
import sqlalchemy as sa
from replay.inspector import app
from replay.inspector.server.guard import Guard
from replay.inspector.server.query_string import QueryString, address
from tests.replay.inspector.addresses import page_addresses, twin_of
from tests.replay.inspector.hostile import EMPTY, HOSTILE, MARK, PLAIN, RUN, SUM, TASK, hostile_buffer
from tests.replay.inspector.serving import Response, Served, served

from replay import ReplayStore
from replay.queries.open_buffer import OpenBuffer
from tests.fakes.postgres_servers import Postgres

PAGES = page_addresses((RUN, EMPTY), TASK, [HOSTILE, PLAIN], held_out=TASK)
TWINS = [twin_of(page) for page in PAGES]


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static/%252e%252e/app.py",
        "/static/vendor/../../app.py",
        "/static/vendor/..%2f..%2fapp.py",
        "/static//etc/passwd",
        "/static/%2fetc/passwd",
        "/static/..\\app.py",
        "/static/..%5capp.py",
        "/static/style.css%00.png",
        "/static/%00",
        "/static/",
        "/static",
        "/static/vendor",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/templates/base.html",
        "/static/C:%5cwindows%5cwin.ini",
        "/static/" + "a" * 10_000,
    ],
)
def test_no_path_leads_out_of_the_static_files(inspector: Served, path: str) -> None:
    response = inspector.ask(path)
    assert 300 <= response.status < 500
    assert not any(word in response.text for word in ("root:", "create_app", "{% block", "Traceback"))


ODD = [
    *(
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "%00",
        "a%00b",
        "..%5c..",
        "%252e%252e",
        "%ff%fe",
        "'",
        "%22",
        "%3Cscript%3E",
    ),
    *("a" * 10_000, "%F0%9F%92%A9", "%0d%0aX-Injected:%201", "1%20or%201=1", "-1", "9" * 30, "nan", "*", "%25", "_"),
]


@pytest.mark.parametrize("odd", ODD)
def test_odd_parts_of_paths_are_told_apart_from_what_is_there(inspector: Served, odd: str) -> None:
    for pattern in ("/runs/{}", "/runs/run-1/iterations/{}", "/trajectories/{}", "/tasks/{}"):
        for target in (pattern.format(odd), twin_of(pattern.format(odd))):
            response = inspector.ask(target)
            assert 400 <= response.status < 500, (target[:80], response.status)
            assert "Traceback" not in response.text and response.header("x-injected") is None


PARAMETERS = [
    *("run", "where", "sort", "order", "after", "before", "limit", "q", "a", "b", "fraction", "sampler", "unit"),
    *("max_staleness", "seed", "token", "segment", "iteration", "quantity", "bins", "field"),
]
WRONG = [
    *("1 or 1=1", "1; drop table trajectories", "' or ''='", '" or ""="', "0) union select 1,2,3 --", "%", "\\"),
    *("reward>0.5) or (1=1", "tool='x", "tool='" + "x" * 9_000 + "'", "nan", "inf", "-1", "1e400", "9" * 400),
    *("()" * 500, "(" * 5_000, "not " * 2_000 + "success", "a" * 10_000, "\ud83d", "\u202e", "\x00", "[]", "{{7*7}}"),
]


def asked_with(inspector: Served, page: str, name: str, value: str) -> Response:
    path, _, query = page.partition("?")
    rest = [pair for pair in query.split("&") if pair and not pair.startswith(f"{name}=")]
    quoted = "".join(f"%{byte:02X}" for byte in value.encode("utf-8", "surrogatepass"))
    return inspector.ask(path + "?" + "&".join([*rest, f"{name}={quoted}"]))


@pytest.mark.parametrize("number", range(len(PAGES)))
def test_wrong_parameters_are_refused_and_break_nothing(inspector: Served, number: int) -> None:
    """Every page, or its twin, gets every value, and a value for every parameter."""
    assert len(WRONG) >= len(PARAMETERS)
    for place, value in enumerate(WRONG, start=number):
        page, name = (PAGES, TWINS)[place % 2][number], PARAMETERS[place % len(PARAMETERS)]
        response = asked_with(inspector, page, name, value)
        assert response.status < 500, (page, name, value[:80], response.text[-300:])
        assert "Traceback" not in response.text and "sqlalchemy" not in response.text.lower(), (page, name, value[:80])
        assert response.status < 400 or len(response.text) < 20_000, "the answer repeats what was asked"


@pytest.mark.parametrize("value", ["1 or 1=1", "1; drop table trajectories", "9" * 400, "-1", "1e400", "nan"])
def test_a_parameter_of_the_wrong_type_is_told_by_its_name(inspector: Served, value: str) -> None:
    response = asked_with(inspector, "/buffer.json", "limit", value)
    assert response.status == 400
    assert json.loads(response.text)["error"].startswith("limit must be a whole number")


def test_metacharacters_in_filters_are_values(inspector: Served) -> None:
    def listed(filter: str) -> list[str]:
        response = asked_with(inspector, "/buffer.json?run=*", "where", filter)
        assert response.status == 200, response.text
        return sorted(row["id"] for row in json.loads(response.text)["rows"])

    assert sorted(listed("reward>=0")) == sorted([HOSTILE, PLAIN])
    for text in ("' or ''='", "%", "_", "\\", "x'; drop table trajectories; --"):
        assert listed(f"stop_reason == {text!r}") == [], text
    assert sorted(listed("reward>=0")) == sorted([HOSTILE, PLAIN])


def test_thousands_of_conditions_are_refused(inspector: Served) -> None:
    many = "/buffer?" + "&".join(["where=success"] * 3_000)
    response = inspector.ask(many)
    assert response.status == 400
    assert "at most" in response.text
    one = asked_with(inspector, "/buffer", "where", " or ".join(["turns == 1"] * 900))
    assert one.status in (200, 400)


# A cursor is a list of texts and numbers that anybody can write.
ODD_CURSORS = [
    [2**70, 0, "x"], [1, 2**63, "x"], [1, 0, 5], [1, 0, None], [float("nan"), 0, "x"], [1, float("inf"), "x"],
    ["1", 0, "x"], [1, 0], [[], 0, "x"],
]  # fmt: skip


@pytest.mark.parametrize("place", ODD_CURSORS)
def test_cursors_of_no_row_are_refused(inspector: Served, place: list[object]) -> None:
    for sort, first in (("iteration", []), ("reward", [0.5]), ("source", ["import"]), ("success", [True])):
        cursor = _encoded(json.dumps([sort, "False", RUN, *first, *place]))
        assert asked_with(inspector, address("buffer.json", run=RUN, sort=sort), "after", cursor).status == 404
    for sort, first in (("reward", 10**400), ("source", 5), ("success", 1), ("reward", True), ("staleness", 2**63)):
        cursor = _encoded(json.dumps([sort, "False", RUN, first, 1, 0, "x"]))
        assert asked_with(inspector, address("buffer.json", run=RUN, sort=sort), "after", cursor).status == 404


@pytest.mark.parametrize("text", ["[" * 7_000, "{}", "null", '"iteration"', "7"])
def test_cursors_that_are_no_list_are_refused(inspector: Served, text: str) -> None:
    assert asked_with(inspector, "/buffer.json", "after", _encoded(text)).status == 404


def _encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


# Errors


def failing(source: OpenBuffer, query: QueryString) -> dict[str, object]:
    raise sa.exc.OperationalError("select secret_column", {}, RuntimeError("postgresql://me:pass-word@host/db"))


def test_errors_tell_no_traceback_and_no_password(hostile_store: ReplayStore, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tuple(replace(page, answer=failing) for page in app.PAGES)
    monkeypatch.setattr(app, "PAGES", broken)
    with served(app.create_app(OpenBuffer(hostile_store), Guard())) as server:
        for target in [*PAGES, *TWINS]:
            response = server.ask(target)
            assert response.status == 500
            assert not any(word in response.text for word in ("pass-word", "secret_column", "Traceback", "sqlalchemy"))
            assert response.header("cache-control") == "no-store"


def test_a_password_of_the_database_is_on_no_page(
    postgres: Postgres, new_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.storage.databases.postgres._WAITS", (0.01,))
    url = sa.make_url(new_database()).set(password="pass-word").render_as_string(hide_password=False)
    hostile_buffer(url).close()
    store = ReplayStore.open(url, read_only=True)
    with served(app.create_app(OpenBuffer(store, named=url), Guard())) as server:
        for target in [*PAGES, *TWINS]:
            response = server.ask(target)
            assert (response.status, "pass-word" in response.text) == (200, False), target
        postgres.drop(url.rpartition("/")[2].partition("?")[0])
        for target in ["/buffer", "/buffer.json"]:
            gone = server.ask(target)
            assert (gone.status, "pass-word" in gone.text) == (503, False)
    store.close()


# What text can't do


def shown_pages() -> Iterator[str]:
    yield from PAGES
    for name in ("run", "where", "sort", "a"):
        yield (
            "/buffer?" + name + "=" + "".join(f"%{byte:02X}" for byte in f"<{MARK}>\u202e{{{{70001*70003}}}}".encode())
        )
    yield "/%3C" + MARK + "%3E"
    yield address("trajectories", f"<{MARK}>")
    yield address("tasks", f"<{MARK}>")


@pytest.mark.parametrize("page", list(shown_pages()))
def test_text_of_a_buffer_is_shown_as_text(inspector: Served, page: str) -> None:
    text = inspector.ask(page).text
    assert f"<{MARK}" not in text and f"</{MARK}" not in text
    assert "<img" not in text and "<svg onload" not in text
    assert SUM not in text
    # Nothing ends a script but the page's own tags.
    assert text.count("<script") == text.count("</script>")
    seen = re.sub(r'(<input[^>]* value=)"[^"]*"', r"\1", text)  # fields give back what they got
    odd = {character for character in seen if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}
    assert odd == set()


def test_the_hostile_text_is_there_to_be_read(inspector: Served) -> None:
    assert f"&lt;{MARK}" in inspector.ask("/buffer").text


@pytest.mark.parametrize("page", [page for page in PAGES if "/overview" not in page])
def test_pages_link_their_twins(inspector: Served, page: str) -> None:
    found = re.search(r'<a class="as-json" href="([^"]*)"', inspector.ask(page).text)
    assert found is not None
    response = inspector.ask(unescape(found[1]).encode().decode("latin-1"))
    assert (response.status, response.header("content-type")) == (200, "application/json")


def test_a_twin_that_stands_elsewhere_leads_to_a_twin(inspector: Served) -> None:
    response = inspector.ask("/buffer.json?text=a%26b&sort=reward")
    assert response.header("location") == "/buffer.json?sort=reward&where=%27a%26b%27%20in%20text"
    assert inspector.ask(str(response.header("location"))).header("content-type") == "application/json"


@pytest.mark.parametrize("twin", TWINS)
def test_twins_are_ascii_and_no_page(inspector: Served, twin: str) -> None:
    response = inspector.ask(twin)
    assert response.status == 200
    assert response.header("content-type") == "application/json"
    assert response.body.isascii()
    json.loads(response.text)
