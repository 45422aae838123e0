"""The page of one iteration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from replay.sampling.samplers import make_sampler
from replay.storage.format import schema
from tests.fakes.records import RUN, iterate, new_store, sql
from tests.replay.pages.serving import Served, inspecting

HERE = f"/runs/{RUN}/iterations"


@pytest.fixture(scope="module")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three iterations of 8 fresh rows in two groups, of which the first tells how ratios were spread. In the last
    both groups are of equal rewards, and one has advantages all the same, by another baseline."""
    path = tmp_path_factory.mktemp("iterations") / "replay.sqlite"
    with closing(new_store(path)) as store:
        for iteration in (1, 2, 3):
            iterate(store, iteration, make_sampler("uniform", 0), count=5)
        measured = {"p01": 0.5, "p50": 1.0, "p99": 1.25}
        store.add_metrics(RUN, 1, {f"actor/replay/ratio_{name}": value for name, value in measured.items()})
    sql(path, "update groups set reward_std = 0.0 where iteration = 3")
    sql(path, "update draws set advantage = 0.0 where iteration = 3 and slot < 4")
    sql(path, "update draws set clip_fraction = slot / 100.0 where iteration = 3")
    with inspecting(path) as server:
        yield server


def rows_of(html: str) -> list[int]:
    """Slots of the table of what went in."""
    row = r'<tr data-href="/trajectories/[^"]+"><td class="text"><span[^>]*>\w+</span></td><td>(\d+)</td>'
    return [int(slot) for slot in re.findall(row, html)]


def between(html: str, first: str, last: str) -> str:
    start = html.index(first)
    return html[start : html.index(last, start)]


def test_page_lists_rows_with_what_was_said_and_leads_to_its_neighbours(inspector: Served) -> None:
    html = inspector.page(f"{HERE}/2")
    # Eight were fresh; the five that were drawn come first.
    assert rows_of(html) == [*range(8, 13), *range(8)]
    assert f'href="{HERE}/1"' in html and f'href="{HERE}/3"' in html
    assert "agentloop replay lineage 2" in html
    assert html.count('<span title="Where is the key?">Where is the key?</span>') == 13
    assert html.count('<span title="in the drawer">in the drawer</span>') == 13
    for number, key in ((1, "n"), (3, "p")):  # the first and the last lead one way only
        html = inspector.page(f"{HERE}/{number}")
        assert re.findall(r'class="button" data-key="([np])"', html) == [key]
        assert html.count('aria-disabled="true"') == 1


def test_page_says_how_ratios_were_spread_and_which_groups_taught_nothing(inspector: Served) -> None:
    def measured(number: int) -> list[str]:
        return re.findall(r"<td>([^<]*)</td>", between(inspector.page(f"{HERE}/{number}"), "<th>1 %</th>", "</table>"))

    assert measured(1) == ["0.500", "1.000", "1.250", "\u2013", "\u2013"]
    assert measured(2) == []
    assert "1 fresh group without an advantage" in inspector.page(f"{HERE}/3")


def test_row_that_went_is_named_with_the_reason(tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        iterate(store, 1, make_sampler("uniform", 0))
        store.prune(RUN, rows=schema.trajectories.c.slot == 2, dry_run=False)
        with inspecting(store) as server:
            html = server.page(f"{HERE}/1")
    assert html.count('evicted <span class="soft">pruned by where</span>') == 1
    assert rows_of(html) == list(range(8))


def test_rows_are_sorted_paged_and_chosen_by_address(inspector: Served) -> None:
    clipped = inspector.page(f"{HERE}/3?sort=clip_fraction")
    assert rows_of(clipped) == list(range(12, -1, -1))
    assert rows_of(inspector.page(f"{HERE}/3?sort=slot&from=10")) == [10, 11, 12]
    assert re.search(r'<th aria-sort="descending"><a href="[^"]*sort=clip_fraction#rows">', clipped)
    # The most clipped come first, whatever the table is sorted by.
    most = between(inspector.page(f"{HERE}/3"), "most clipped", "</table>")
    assert re.findall(r"([0-9.]+)\u00a0%", most)[:3] == ["12.0", "11.0", "10.0"]
    drawn, fresh = (inspector.page(f"{HERE}/3?stream={name}&sort=clip_fraction") for name in ("replay", "fresh"))
    assert (rows_of(drawn), rows_of(fresh)) == ([12, 11, 10, 9, 8], [7, 6, 5, 4, 3, 2, 1, 0])
    assert "1 to 5 of 5</span>" in drawn
    # The other stream is one click away in the same order.
    assert f'href="{HERE}/3?stream=fresh&amp;sort=clip_fraction#rows">fresh 8</a>' in drawn


@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        (f"{HERE}/4", 404, "iteration must be a committed one, from 1 to 3, got 4"),
        (f"{HERE}/one", 400, "number must be a whole number"),
        (f"{HERE}/1?sort=size", 400, "sort must be one of stream, slot, "),
        (f"{HERE}/1?stream=old", 400, "stream must be one of both, replay, fresh, got 'old'"),
        ("/runs/nobody/iterations/1", 404, "run must name one run"),
    ],
)
def test_what_is_not_there_is_one_line(inspector: Served, target: str, status: int, message: str) -> None:
    found, text = inspector.problem(target)
    assert (found, message in text) == (status, True), text
