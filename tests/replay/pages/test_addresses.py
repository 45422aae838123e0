import html
import re
import shlex
import unicodedata
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit
from xml.etree import ElementTree

import pytest
from starlette.requests import Request

from replay import ReplayStore
from replay.pages.addresses import BadQuery, address, read_choice, read_number, read_parameter, read_parameters
from replay.pages.commands import quote_command
from replay.pages.templating import environment, visible_text
from tests.fakes.records import put, trajectory
from tests.replay.pages.serving import inspecting


def asked(*pairs: tuple[str, str]) -> Request:
    return Request({"type": "http", "query_string": urlencode(pairs).encode(), "headers": []})


def test_every_part_of_an_address_comes_back_as_it_was() -> None:
    id = "a/b?c#d%2Fé ü\u202e:*"
    split = urlsplit(address("runs", id, run="x&y=z", where=["reward>0.5", "'ü' in text"], sort=None, after=""))
    # A server takes one layer of quotes away and splits at slashes, then the page takes the other.
    assert [unquote(part) for part in unquote(split.path).split("/")] == ["", "runs", id]
    assert parse_qsl(split.query) == [("run", "x&y=z"), ("where", "reward>0.5"), ("where", "'ü' in text")]


def test_the_last_of_several_values_holds_and_empty_ones_count_as_none() -> None:
    request = asked(("where", ""), ("where", "success"), ("colour", "red"), ("colour", "green"), ("limit", ""))
    assert read_choice(request, "sort", ["first", "second"]) == "first"
    assert (read_parameter(request, "sort"), read_parameters(request, "where")) == (None, ["success"])
    assert read_choice(request, "colour", ["red", "green"]) == "green"
    assert read_number(request, "limit", 50) == 50


@pytest.mark.parametrize("given", ["1 or 1=1", "-1", "1.5", "0x10", "١", "9" * 30, "501", "nan", "1_0", "y" * 5000])
def test_whole_numbers_and_choices_are_checked(given: str) -> None:
    with pytest.raises(BadQuery, match=r"limit must be a whole number from 0 to 500, got '") as refused:
        read_number(asked(("limit", given)), "limit", 50, most=500)
    assert len(str(refused.value)) < 200
    with pytest.raises(BadQuery, match="colour must be one of red, green, got 'blue'"):
        read_choice(asked(("colour", "blue")), "colour", ["red", "green", "red"])


@pytest.mark.parametrize("word", ["'answer' in text", "a \"b\" 'c'", "'$HOME'", "'`id`'", "it's \\ here", "'!x'", ""])
def test_a_shell_reads_what_was_meant(word: str) -> None:
    assert shlex.split(quote_command(["ls", word])) == ["ls", word]
    # Filters are typed between double quotes.
    assert quote_command(["ls", "--where", "tool == 'lookup'"]) == "ls --where \"tool == 'lookup'\""


def test_every_character_that_acts_or_hides_is_written_out() -> None:
    acting = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")]
    assert [hex(ord(c)) for c in acting if c not in "\n\t" and visible_text(c) == c] == []
    whole_text = "é 漢 😀 <b>&\"'\n\t"
    assert visible_text(whole_text) == whole_text
    assert environment().from_string("{{ text }}").render(text="<i>\u202e") == "&lt;i&gt;&lt;U+202E&gt;"


# Distributions as bars

_HEIGHT = 96 - 18 - 14
"""Pixels of a full bar: the picture without its labels and the line above the bars."""


def bars(*shown: dict[str, Any], summary: str = "letters", **more: Any) -> str:
    picture = environment().get_template("bars.html").module.picture  # type: ignore[attr-defined]
    return str(picture(list(shown), summary, **more))


def bar(label: str, count: float, **more: Any) -> dict[str, Any]:
    return {"label": label, "count": count, **more}


def _heights(svg: str) -> list[float]:
    return [float(tall) for tall in re.findall(r'class="bar"[^>]*height="([0-9.]+)"', svg)]


def test_bars_are_as_high_as_their_counts_and_the_smallest_stays_visible() -> None:
    svg = bars(bar("a", 4), bar("b", 1), bar("c", 0), bar("d", 0.001))
    assert _heights(svg) == [_HEIGHT, _HEIGHT / 4, 0.0, 2.0]
    assert _heights(bars(bar("a", 4), bar("b", 16), largest=8)) == [_HEIGHT / 2, _HEIGHT]  # pictures to one scale


def test_bars_that_lead_somewhere_are_links_and_the_chosen_one_says_so() -> None:
    hostile = '"><script>alert(1)</script>'
    svg = bars(bar("a", 3, href="/buffer?x=1&y=2", selected=True), bar("b", 1200), bar(hostile, 1), summary=hostile)
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == hostile and not list(root.iter("script")) and "style=" not in svg
    (link,) = root.iter("a")
    assert (link.get("href"), link.get("aria-current"), root.get("role")) == ("/buffer?x=1&y=2", "true", "group")
    assert [title.text for title in root.iter("title")] == ["a: 3", "b: 1,200", f"{hostile}: 1"]


def test_row_whose_id_is_no_utf_8_is_listed_and_opened(file_store: ReplayStore) -> None:
    odd = "x\ud800/y"
    put(file_store, trajectory(odd), trajectory("b", slot=1, member=1))
    with inspecting(file_store) as server:
        assert address("trajectories", odd) in html.unescape(server.page("/buffer"))
        assert "U+D800" in server.page(address("trajectories", odd))
