import re
import unicodedata
from collections.abc import Callable
from html import unescape

import pytest
import sqlalchemy as sa

from replay.pages.addresses import address
from tests.fakes.postgres_servers import LocalServer
from tests.replay.pages.hostile import EMPTY, HOSTILE, MARK, PLAIN, RUN, SUM, TASK, hostile_buffer
from tests.replay.pages.serving import Response, Served, inspecting, page_addresses

PAGES = page_addresses((RUN, EMPTY), TASK, [HOSTILE, PLAIN], held_out=TASK)


OUTSIDE = [
    *("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static/%252e%252e/app.py"),
    *("/static/vendor/..%2f..%2fapp.py", "/static//etc/passwd", "/static/%2fetc/passwd", "/static/..%5capp.py"),
    *("/static/style.css%00.png", "/static/", "/static", "/static/vendor", "/%2e%2e/%2e%2e/etc/passwd"),
    *("/templates/base.html", "/static/" + "a" * 10_000),
]
ODD = [
    *("%2e%2e", "..%2f..%2fetc%2fpasswd", "%00", "a%00b", "%252e%252e", "%ff%fe", "'", "%22", "%3Cscript%3E"),
    *("a" * 10_000, "%0d%0aX-Injected:%201", "1%20or%201=1", "-1", "9" * 30, "nan", "*", "%25", "_"),
]
ODD_PATHS = [
    pattern.format(odd)
    for pattern in ("/runs/{}", f"/runs/{EMPTY}/iterations/{{}}", "/trajectories/{}", "/tasks/{}")
    for odd in ODD
]


def test_odd_paths_lead_nowhere(inspector: Served) -> None:
    for path in [*OUTSIDE, *ODD_PATHS]:
        response = inspector.ask(path)
        assert (300 if path in OUTSIDE else 400) <= response.status < 500, (path, response.status)
        assert not any(word in response.text for word in ("root:", "create_app", "{% block", "Traceback")), path
        assert response.header("x-injected") is None, path


PARAMETERS = [
    *("run", "where", "sort", "order", "after", "before", "limit", "text", "id", "show", "fraction", "sampler", "unit"),
    *("max_staleness", "token", "segment", "iteration", "first", "view", "stream", "turn", "mark"),
]
WRONG = [
    *("1 or 1=1", "1; drop table trajectories", "' or ''='", "0) union select 1,2,3 --", "%", "\\"),
    *("reward>0.5) or (1=1", "tool='" + "x" * 9_000 + "'", "nan", "inf", "-1", "1e400", "9" * 400),
    *("()" * 500, "(" * 5_000, "not " * 2_000 + "success", "a" * 10_000, "\ud83d", "\u202e", "\x00", "[]", "{{7*7}}"),
]


def asked_with(inspector: Served, page: str, name: str, value: str) -> Response:
    path, _, query = page.partition("?")
    rest = [pair for pair in query.split("&") if pair and not pair.startswith(f"{name}=")]
    quoted = "".join(f"%{byte:02X}" for byte in value.encode("utf-8", "surrogatepass"))
    return inspector.ask(path + "?" + "&".join([*rest, f"{name}={quoted}"]))


@pytest.mark.parametrize("number", range(len(PAGES)))
def test_wrong_parameters_are_refused_and_break_nothing(inspector: Served, number: int) -> None:
    """Every page gets every value, and a value for every parameter."""
    assert len(WRONG) == len(PARAMETERS)
    for place, value in enumerate(WRONG, start=number):
        page, name = PAGES[number], PARAMETERS[place % len(PARAMETERS)]
        response = asked_with(inspector, page, name, value)
        assert response.status < 500, (page, name, value[:80], response.text[-300:])
        assert "Traceback" not in response.text and "sqlalchemy" not in response.text.lower(), (page, name, value[:80])
        assert response.status < 400 or len(response.text) < 20_000, "the answer repeats what was asked"


def test_an_error_of_the_database_says_nothing_of_it(inspector: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("pass-word in secret_column of sqlalchemy")

    monkeypatch.setattr("replay.questions.page", failing)
    response = inspector.ask("/buffer")
    assert response.status == 500
    assert not any(word in response.text for word in ("pass-word", "secret_column", "Traceback", "sqlalchemy"))
    assert response.header("cache-control") == "no-store"


def test_a_password_of_the_database_is_on_no_page(
    postgres: LocalServer, new_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.storage.databases.postgres._WAITS", (0.01,))
    url = sa.make_url(new_database()).set(password="pass-word").render_as_string(hide_password=False)
    hostile_buffer(url).close()
    with inspecting(url, named=url) as server:
        for target in PAGES:
            response = server.ask(target)
            assert (response.status, "pass-word" in response.text) == (200, False), target
        postgres.drop(url.rpartition("/")[2].partition("?")[0])
        gone = server.ask("/buffer")
        assert (gone.status, "pass-word" in gone.text) == (503, False)


ASKED = [
    *PAGES,
    *(address("buffer", **{name: f"<{MARK}>\u202e{{{{70001*70003}}}}"}) for name in ("run", "where", "sort")),
    address(f"<{MARK}>"),
    address("trajectories", f"<{MARK}>"),
]


@pytest.mark.parametrize("page", ASKED)
def test_text_of_a_buffer_is_shown_as_text(inspector: Served, page: str) -> None:
    response = inspector.ask(page)
    if response.header("content-type") == "application/json":
        assert response.body.isascii()
        return
    text = response.text
    assert f"<{MARK}" not in text and f"</{MARK}" not in text
    assert "<img" not in text and "<svg onload" not in text
    assert SUM not in text
    # Nothing ends a script but the page's own tags, and a script is a file of ours or data for one.
    assert text.count("<script") == text.count("</script>")
    for attributes in (opening[: opening.index(">")] for opening in text.split("<script")[1:]):
        assert "src=" in attributes or 'type="application/json"' in attributes, attributes
    assert "<style" not in text and " style=" not in text
    seen = re.sub(r'(<input[^>]* value=)"[^"]*"', r"\1", text)  # fields give back what they got
    odd = {character for character in seen if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}
    assert odd == set()
    if page == address("trajectories", HOSTILE):
        assert f"<{MARK}>bold</{MARK}>" in unescape(text) and "<U+202E>" in unescape(text)
