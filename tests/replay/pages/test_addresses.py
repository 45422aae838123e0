"""Addresses and what they ask; commands as people type them; text that can't be seen."""

from __future__ import annotations

import shlex
import unicodedata
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import pytest
from starlette.requests import Request

from replay.pages.addresses import BadQuery, address, choice, text, texts, whole
from replay.pages.reading import typed
from replay.pages.templating import environment, visible_text


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
    assert choice(request, "sort", ["first", "second"]) == "first"
    assert (text(request, "sort"), texts(request, "where")) == (None, ["success"])
    assert choice(request, "colour", ["red", "green"]) == "green"
    assert whole(request, "limit", 50) == 50


@pytest.mark.parametrize("given", ["1 or 1=1", "-1", "1.5", "0x10", "١", "9" * 30, "501", "nan", "1_0", "y" * 5000])
def test_whole_numbers_and_choices_are_checked(given: str) -> None:
    with pytest.raises(BadQuery, match=r"limit must be a whole number from 0 to 500, got '") as refused:
        whole(asked(("limit", given)), "limit", 50, most=500)
    assert len(str(refused.value)) < 200
    with pytest.raises(BadQuery, match="colour must be one of red, green, got 'blue'"):
        choice(asked(("colour", "blue")), "colour", ["red", "green", "red"])


@pytest.mark.parametrize("word", ["'answer' in text", "a \"b\" 'c'", "'$HOME'", "'`id`'", "it's \\ here", "'!x'", ""])
def test_a_shell_reads_what_was_meant(word: str) -> None:
    assert shlex.split(typed(["ls", word])) == ["ls", word]
    # Filters are typed between double quotes.
    assert typed(["ls", "--where", "tool == 'lookup'"]) == "ls --where \"tool == 'lookup'\""


def test_every_character_that_acts_or_hides_is_written_out() -> None:
    acting = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")]
    assert [hex(ord(c)) for c in acting if c not in "\n\t" and visible_text(c) == c] == []
    whole_text = "é 漢 😀 <b>&\"'\n\t"
    assert visible_text(whole_text) == whole_text
    assert environment().from_string("{{ text }}").render(text="<i>\u202e") == "&lt;i&gt;&lt;U+202E&gt;"
