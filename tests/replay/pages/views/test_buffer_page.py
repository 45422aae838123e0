"""The page of the list: what it says of its rows, and of a filter that it can't read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path

import pytest

from replay import ReplayStore
from replay.pages.addresses import address
from replay.pages.app import create_app
from replay.questions.open_buffer import OpenBuffer
from replay.sampling.samplers import make_sampler
from tests.fakes.records import RUN, iterate, new_store
from tests.replay.pages.serving import Served, served


@pytest.fixture(scope="module")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path: Path = tmp_path_factory.mktemp("list") / "replay.sqlite"
    with closing(new_store(path)) as store:
        for iteration in (1, 2, 3):
            iterate(store, iteration, make_sampler("uniform", 0), count=3)
    with (
        closing(ReplayStore.open(path, read_only=True)) as store,
        served(create_app(OpenBuffer(store))) as server,
    ):
        yield server


def listed(html: str) -> int:
    return len(re.findall(r'<tr data-href="/trajectories/', html))


def test_rows_say_what_was_asked_and_how_far_they_drifted(inspector: Served) -> None:
    html = inspector.ask("/buffer").text
    assert listed(html) == html.count(">Where is the key?</span>") == html.count(">in the drawer</span>") == 24
    # Every row was used at least once, fresh.
    assert html.count("<td>1.100</td>\n<td>1.50</td>") == 24


def test_spread_says_how_stale_the_buffer_is(inspector: Served) -> None:
    html = inspector.ask("/buffer/overview").text
    # Eight rows each of policies 0, 1 and 2, where 3 is the newest.
    assert "24 trajectories · those that can be drawn: staleness 2.0 on average, 3 at most</span>" in html


def test_filter_that_cannot_be_read_is_told_beside_its_field_and_the_page_stays(inspector: Served) -> None:
    given = address("buffer", run=RUN, sort="reward", where=["iteration == 2", "rewrd > 0.5"])
    answer = inspector.ask(given)
    assert answer.status == 200
    html = unescape(answer.text)
    assert listed(html) == 8
    field = unescape(re.findall(r'<input id="where"[^>]*>', answer.text)[0])
    assert 'value="rewrd > 0.5"' in field and 'aria-describedby="wrong-where"' in field
    (told,) = re.findall(r'<div class="wrong" id="wrong-where" role="alert">(.*?)</div>', html)
    assert told == "<p>where must name a field here, got 'rewrd'. Did you mean reward?</p>"
    # What was understood is kept, and what comes next builds on it.
    assert re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', html) == [
        ("run", RUN),
        ("sort", "reward"),
        ("where", "iteration == 2"),
    ]
    assert "rewrd" not in html.replace(field, "").replace(told, "")


def test_every_filter_that_cannot_be_read_is_told(inspector: Served) -> None:
    html = unescape(inspector.ask(address("buffer", where=["a > 1", "success", "b > 1"])).text)
    (told,) = re.findall(r'role="alert">(.*?)</div>', html)
    assert re.findall(r"got '(\w)'", told) == ["a", "b"]
    assert listed(html) == 9
