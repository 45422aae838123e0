"""The page of one iteration."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from replay.inspector.app import create_app
from replay.inspector.drawings.histograms import spreads
from replay.inspector.server.guard import Guard
from tests.replay.inspector.serving import Served, served

from replay import ReplayStore, queries
from replay.queries.open_buffer import OpenBuffer
from replay.records import FRESH, REPLAY, Histogram
from replay.sampling.samplers import make_sampler
from replay.storage.format import schema
from replay.storage.format.ratio_histograms import count
from tests.fakes.records import RUN, iterate, new_store, run_record, sql
from tests.fakes.replay_command import ask

HERE = f"/runs/{RUN}/iterations"
SPREAD = [
    Histogram("ratio", FRESH, "", count(np.zeros(1000))),
    Histogram("ratio", REPLAY, "1", count([*np.zeros(90), *np.full(10, 0.5)])),
    Histogram("ratio", REPLAY, "2-3", count([0.0, -0.5])),
    Histogram("drift", REPLAY, "1", count([0.0])),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations of 8 fresh rows in two groups; of the first no histogram was kept. In the last both groups are
    of equal rewards, and one has advantages all the same, by another baseline."""
    path = tmp_path_factory.mktemp("iterations") / "replay.sqlite"
    with closing(new_store(path)) as store:
        for iteration in (1, 2, 3):
            spread = SPREAD if iteration > 1 else []
            iterate(store, iteration, make_sampler("uniform", 0), count=5, histograms=spread)
    sql(path, "update groups set reward_std = 0.0 where iteration = 3")
    sql(path, "update draws set advantage = 0.0 where iteration = 3 and slot < 4")
    sql(path, "update draws set clip_fraction = slot / 100.0 where iteration = 3")
    return path


@pytest.fixture(scope="module")
def inspector(path: Path) -> Iterator[Served]:
    with (
        closing(ReplayStore.open(path, read_only=True)) as store,
        served(create_app(OpenBuffer(store), Guard())) as server,
    ):
        yield server


def page(inspector: Served, target: str) -> str:
    answer = inspector.ask(target)
    assert answer.status == 200, answer.text
    return answer.text


def rows_of(html: str) -> list[int]:
    """Slots of the table of what went in."""
    told = re.findall(
        r'<tr data-href="/trajectories/[^"]+"><td class="text"><span[^>]*>\w+</span></td><td>(\d+)</td>', html
    )
    return [int(slot) for slot in told]


def test_page_and_twin_answer_what_the_terminal_answers(inspector: Served, path: Path) -> None:
    twin = json.loads(page(inspector, f"{HERE}/2.json"))
    with closing(ReplayStore.open(path, read_only=True)) as store:
        assert twin.pop("name") == store.run(RUN).name
        assert twin == queries.iteration(store, RUN, 2)
    html = page(inspector, f"{HERE}/2")
    assert [row["slot"] for row in twin["trajectories"]] == list(range(13))
    # Eight were fresh; the five that were drawn come first.
    assert rows_of(html) == [*range(8, 13), *range(8)]
    assert 'href="/runs/run-1/iterations/1"' in html
    assert 'href="/runs/run-1/iterations/3"' in html
    assert "agentloop replay lineage 2" in html


def test_row_that_went_is_told_with_the_reason(tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        iterate(store, 1, make_sampler("uniform", 0))
        store.prune(RUN, rows=schema.trajectories.c.slot == 2, dry_run=False)
        with served(create_app(OpenBuffer(store), Guard())) as server:
            html = page(server, f"{HERE}/1")
    assert html.count('evicted <span class="soft">pruned by where</span>') == 1
    assert rows_of(html) == list(range(8))


def test_told_command_names_the_run_where_there_are_several(path: Path, tmp_path: Path) -> None:
    database = Path(shutil.copy(path, tmp_path / "two.sqlite"))
    with closing(ReplayStore.open(database)) as store:
        store.add_run(run_record("run-2"))
        with served(create_app(OpenBuffer(store, named=str(database)), Guard())) as found:
            html = page(found, f"{HERE}/2")
    (told,) = re.findall(r"agentloop replay (lineage 2 [^<]*)", html)
    assert told == f"lineage 2 {database} --run {RUN}"
    assert ask(*told.split()).exit_code == 0


def test_first_and_last_iteration_lead_one_way_only(inspector: Served) -> None:
    for number, key in ((1, "n"), (3, "p")):
        html = page(inspector, f"{HERE}/{number}")
        assert re.findall(r'class="button" data-key="([np])"', html) == [key]
        assert html.count('aria-disabled="true"') == 1


def test_every_stream_and_age_has_a_picture_on_one_scale(inspector: Served) -> None:
    html = page(inspector, f"{HERE}/2")
    told = re.findall(r'<svg class="bars (fresh|replay)"[^>]*aria-label="([^"]*)"', html)
    assert [(tone, summary.split(":")[0]) for tone, summary in told] == [
        ("fresh", "ratio of 1,000 tokens of fresh rows"),
        ("replay", "ratio of 102 tokens of replay rows"),
        ("replay", "ratio of 100 tokens of replay rows of age 1"),
        ("replay", "ratio of 2 tokens of replay rows of age 2-3"),
        # Of one age only: that is all of them.
        ("replay", "drift of 1 tokens of replay rows"),
    ]
    assert "median 1.00, 98 % from 1.00 to 1.65" in html  # e^0.5 = 1.649 is a tenth of those of age 1


def test_pictures_count_every_token_once() -> None:
    answers = [{"quantity": h.quantity, "stream": h.stream, "age": h.age, "counts": h.counts.tolist()} for h in SPREAD]
    ratio, drift = spreads(answers)
    assert [(each.stream, each.age, each.tokens) for each in ratio.pictures] == [
        ("fresh", "", 1000),
        ("replay", "", 102),
        ("replay", "1", 100),
        ("replay", "2-3", 2),
    ]
    for each in (*ratio.pictures, *drift.pictures):
        shown = [int(n.replace(",", "")) for n in re.findall(r"<title>[^<]*: ([0-9,]+) tokens", each.drawing)]
        assert sum(shown) == each.tokens
    # Bars end where 98 of 100 tokens of each are in: beyond 0.5 nats, in bins of 0.05 nats around 0.
    assert len(re.findall('class="bar"', ratio.pictures[0].drawing)) == 2 * 10 + 1 + 2


def test_an_iteration_without_histograms_says_so(inspector: Served) -> None:
    html = page(inspector, f"{HERE}/1")
    assert "was not kept when this iteration was made" in html
    assert 'class="bars' not in html
    assert "Not what was written" not in html


def test_groups_show_their_members_and_flat_ones_stand_apart(inspector: Served, path: Path) -> None:
    html = page(inspector, f"{HERE}/3")
    assert "1 fresh group without an advantage" in html
    ((members,),) = sql(path, "select count(*) from draws d where iteration = 3 and stream = 'replay'")
    strips = re.findall(r'<svg class="strip".*?</svg>', html, re.DOTALL)
    assert sum(strip.count("<circle") for strip in strips) == 4
    assert html.count(">flat</span>") == 1
    assert sum(len(re.findall('<rect class="replay', strip)) for strip in strips) == members == 5


def test_rows_are_sorted_and_paged_by_address(inspector: Served) -> None:
    clipped = page(inspector, f"{HERE}/3?sort=clip_fraction")
    assert rows_of(clipped) == list(range(12, -1, -1))
    assert rows_of(page(inspector, f"{HERE}/3?sort=slot&from=10")) == [10, 11, 12]
    assert re.search(r'<th aria-sort="descending"><a href="[^"]*sort=clip_fraction#rows">', clipped)
    # The most clipped come first, whatever the table is sorted by.
    most = html_between(page(inspector, f"{HERE}/3"), "most clipped", "</table>")
    assert re.findall(r"([0-9.]+)\u00a0%", most)[:3] == ["12.0", "11.0", "10.0"]


def test_rows_of_one_stream_are_listed_alone(inspector: Served) -> None:
    drawn, fresh = (page(inspector, f"{HERE}/3?stream={stream}&sort=clip_fraction") for stream in ("replay", "fresh"))
    assert (rows_of(drawn), rows_of(fresh)) == ([12, 11, 10, 9, 8], [7, 6, 5, 4, 3, 2, 1, 0])
    assert "1 to 5 of 5</span>" in drawn
    # The other stream is one click away in the same order.
    assert f'href="{HERE}/3?stream=fresh&amp;sort=clip_fraction#rows">fresh 8</a>' in drawn


def test_rows_say_what_was_asked_and_answered_last(inspector: Served) -> None:
    html = page(inspector, f"{HERE}/2")
    assert html.count('<span title="Where is the key?">Where is the key?</span>') == 13
    assert html.count('<span title="in the drawer">in the drawer</span>') == 13


def html_between(html: str, first: str, last: str) -> str:
    start = html.index(first)
    return html[start : html.index(last, start)]


@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        (f"{HERE}/4", 404, "iteration must be a committed one, from 1 to 3, got 4"),
        (f"{HERE}/one", 400, "number must be a whole number"),
        (f"{HERE}/1?sort=size", 400, "sort must be one of stream, slot, "),
        (f"{HERE}/1?stream=old", 400, "stream must be one of both, replay, fresh, got &#39;old&#39;"),
        ("/runs/nobody/iterations/1", 404, "run must name one run"),
    ],
)
def test_what_is_not_there_is_one_line(inspector: Served, target: str, status: int, message: str) -> None:
    answer = inspector.ask(target)
    assert (answer.status, message in answer.text) == (status, True), answer.text
