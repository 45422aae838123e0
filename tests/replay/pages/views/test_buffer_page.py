"""The page of the list: what it says of its rows, and of a filter that it can't read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from html import unescape

import pytest

from replay.pages.addresses import address
from replay.sampling.samplers import make_sampler
from tests.fakes.records import RUN, iterate, new_store
from tests.replay.pages.serving import Served, inspecting


@pytest.fixture(scope="module")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("list") / "replay.sqlite"
    with closing(new_store(path)) as store:
        for iteration in (1, 2, 3):
            iterate(store, iteration, make_sampler("uniform", 0), count=3)
    with inspecting(path) as server:
        yield server


def listed(html: str) -> int:
    return len(re.findall(r'<tr data-href="/trajectories/', html))


def test_rows_say_what_was_asked_and_how_far_they_drifted_and_how_stale_they_are(inspector: Served) -> None:
    html = inspector.page("/buffer")
    assert listed(html) == html.count(">Where is the key?</span>") == html.count(">in the drawer</span>") == 24
    # Every row was used at least once, fresh.
    assert html.count("<td>1.100</td>\n<td>1.50</td>") == 24
    # Eight rows each of policies 0, 1 and 2, where 3 is the newest.
    spread = "24 trajectories · those that can be drawn: staleness 2.0 on average, 3 at most</span>"
    assert spread in inspector.page("/buffer/overview")


def test_filters_that_cannot_be_read_are_named_by_their_field_and_the_page_stays(inspector: Served) -> None:
    answer = inspector.page(address("buffer", run=RUN, sort="reward", where=["iteration == 2", "rewrd > 0.5"]))
    html = unescape(answer)
    assert listed(html) == 8
    field = unescape(re.findall(r'<input id="where"[^>]*>', answer)[0])
    assert 'value="rewrd > 0.5"' in field and 'aria-describedby="wrong-where"' in field
    (wrong,) = re.findall(r'<div class="wrong" id="wrong-where" role="alert">(.*?)</div>', html)
    assert wrong == "<p>where must name a field here, got 'rewrd'. Did you mean reward?</p>"
    # What was understood is kept, and what comes next builds on it.
    assert re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', html) == [
        ("run", RUN),
        ("sort", "reward"),
        ("where", "iteration == 2"),
    ]
    assert "rewrd" not in html.replace(field, "").replace(wrong, "")
    two = unescape(inspector.page(address("buffer", where=["a > 1", "success", "b > 1"])))
    (wrong,) = re.findall(r'role="alert">(.*?)</div>', two)
    assert (re.findall(r"got '(\w)'", wrong), listed(two)) == (["a", "b"], 9)
