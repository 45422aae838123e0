from __future__ import annotations

from enum import StrEnum
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from replay.inspector.server.query_string import BadQuery, QueryString, address


class Colour(StrEnum):
    red = "red"
    green = "green"


def test_every_part_of_an_address_comes_back_as_it_was() -> None:
    id = "a/b?c#d%2Fé ü\u202e:*"
    split = urlsplit(address("runs", id, run="x&y=z", where=["reward>0.5", "'ü' in text"], sort=None, after=""))
    # A server takes one layer of quotes away and splits at slashes, then the page takes the other.
    parts = unquote(split.path).split("/")
    assert [unquote(part) for part in parts] == ["", "runs", id]
    assert parse_qsl(split.query) == [("run", "x&y=z"), ("where", "reward>0.5"), ("where", "'ü' in text")]


def test_plain_ids_need_no_quotes() -> None:
    assert address("trajectories", "3f9a21b0") == "/trajectories/3f9a21b0"


def test_empty_values_count_as_none_given() -> None:
    query = QueryString([("sort", ""), ("where", ""), ("where", "success"), ("colour", ""), ("limit", "")])
    assert query.text("sort") is None
    assert query.texts("where") == ["success"]
    assert query.choice("colour", Colour.red) is Colour.red
    assert query.whole("limit", 50) == 50
    assert query.items() == [("where", "success")]


def test_the_last_of_several_values_holds() -> None:
    query = QueryString([("limit", "10"), ("limit", "20"), ("colour", "red"), ("colour", "green"), ("own", "on")])
    assert query.whole("limit", 50) == 20
    assert query.choice("colour", Colour.red) is Colour.green
    assert query.flag("own") is True


@pytest.mark.parametrize("given", ["1 or 1=1", "-1", "1.5", "0x10", "١", "9" * 30, "501", "nan", "1_0", "--1", "-"])
def test_whole_numbers_are_checked(given: str) -> None:
    with pytest.raises(BadQuery, match=r"limit must be a whole number from 0 to 500, got '"):
        QueryString([("limit", given)]).whole("limit", 50, most=500)


def test_choices_and_flags_are_checked() -> None:
    with pytest.raises(BadQuery, match="colour must be one of red, green, got 'blue'"):
        QueryString([("colour", "blue")]).choice("colour", Colour.red)
    with pytest.raises(BadQuery, match="own must be true or false, got 'maybe'"):
        QueryString([("own", "maybe")]).flag("own")


def test_requests_without_measure_are_refused() -> None:
    with pytest.raises(BadQuery, match="where must be given at most 50 times"):
        QueryString([("where", "success")] * 51)
    with pytest.raises(BadQuery, match="where must have at most 10,000 characters, got 10,001"):
        QueryString([("where", "x" * 10_001)])
    with pytest.raises(BadQuery) as refused:
        QueryString([("limit", "y" * 5000)]).whole("limit", 1)
    assert len(str(refused.value)) < 200
