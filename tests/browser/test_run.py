"""A run's page, read by a person and while the run goes on."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from agentloop.runs.run_report import report_run
from replay import ReplayStore
from replay.open_buffer import open_buffer
from replay.pages.addresses import address
from replay.pages.app import create_app
from replay.pages.templating import visible_text
from tests.browser.conftest import Watched
from tests.browser.demonstration import ITERATIONS, NAME, OTHER
from tests.browser.legible import FAINT
from tests.fakes.runs import rows
from tests.replay.pages.serving import Served, served

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def values(page: Page, panel: str) -> Locator:
    """The rows of the table that holds a chart's numbers."""
    table = page.locator(f"#panel-{panel} details.chart-values")
    if table.get_attribute("open") is None:
        table.locator("summary").click()
    found = table.locator("tbody tr")
    found.first.wait_for()
    return found


def test_curves_of_both_streams_are_drawn_and_can_be_read(page: Page, server: Served, run_folder: Path) -> None:
    page.goto(server.address + "/?all=1")
    page.get_by_role("link", name=f"{NAME}-001", exact=True).first.click()
    page.wait_for_url("**/runs/*")
    page.get_by_text(f"finished after iteration {ITERATIONS} of at most {ITERATIONS}").wait_for()
    page.locator(".chart canvas").nth(9).wait_for()
    drift = rows(
        run_folder / "replay.sqlite",
        f"""select iteration, value from metrics where name = 'actor/replay/drift_mean' and value is not null
        and run <> '{OTHER}' order by iteration""",
    )
    shown = [row.split("\t") for row in values(page, "drift").all_inner_texts()]
    assert [row[0] for row in shown] == ["6", "5", "4", "3", "2", "1"]
    assert [float(row[2]) for row in shown[:-1]] == pytest.approx([value for _, value in reversed(drift)], abs=0.01)
    # Nothing was there to be replayed at first.
    assert shown[-1][2] == "\u2013"


@pytest.fixture
def long(run_folder: Path, tmp_path: Path) -> Iterator[tuple[ReplayStore, str]]:
    """A run of 256 iterations, of which nothing is replayed before the 200th, and the address of its live page."""
    database = tmp_path / "replay.sqlite"
    shutil.copy(run_folder / "replay.sqlite", database)
    (tmp_path / "run.json").write_text(json.dumps({"id": OTHER, "config": {"replay": {}}}))
    store = ReplayStore.open(database)
    for iteration in range(3, 257):
        log(store, iteration, iteration / 128)
    with open_buffer(str(database)) as source, served(create_app(source)) as live:
        yield store, live.address + address("runs", OTHER)
    store.close()


def log(store: ReplayStore, iteration: int, norm: float) -> None:
    values = {"actor/grad_norm": norm, "time/iteration": 1.0}
    store.add_metrics(OTHER, iteration, values | ({"replay/staleness_mean": 5.0} if iteration >= 200 else {}))


def zoom(page: Page, panel: str, first: float, last: float) -> None:
    """Drag over a chart, from one part of its width to another."""
    drawing = page.locator(f"#panel-{panel} .u-over")
    drawing.scroll_into_view_if_needed()
    box = drawing.bounding_box()
    assert box
    page.mouse.move(box["x"] + first * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + last * box["width"], box["y"] + 60, steps=4)
    page.mouse.up()


def test_a_live_page_follows_a_long_run_in_merged_points(long: tuple[ReplayStore, str], page: Page) -> None:
    store, page_of_run = long
    page.goto(page_of_run)
    assert values(page, "gradient-norm").first.inner_text() == "256\t2"
    # A row that is written again stays the one that Enter opens.
    page.keyboard.press("j")
    store.add_metrics(OTHER, 256, {"eval/success": 0.125})
    page.locator('#iterations [data-at="256"]', has_text="12.5").wait_for(timeout=15_000)
    assert page.evaluate("document.activeElement.textContent") == "256"
    log(store, 257, 3.0)
    page.get_by_text("Each point is 2 iterations").wait_for(timeout=15_000)
    page.get_by_text("live, iteration 257").wait_for()
    assert values(page, "gradient-norm").first.inner_text() == "257\u2013258\t3"
    # Zoomed into, they are iterations again, and go on being so while the run goes on.
    zoom(page, "gradient-norm", 0.6, 0.999)
    page.get_by_text("Each point is an iteration.").wait_for()
    assert values(page, "gradient-norm").nth(1).inner_text() == "256\t2"
    log(store, 258, 5.0)
    page.locator("#panel-gradient-norm").get_by_role("cell", name="258", exact=True).wait_for(timeout=15_000)
    assert values(page, "gradient-norm").first.inner_text() == "258\t5"
    page.locator("#panel-gradient-norm .u-over").dblclick()
    page.get_by_text("Each point is 2 iterations").wait_for()
    assert values(page, "gradient-norm").first.inner_text() == "257\u2013258\t4"
    page.close()  # before its server ends


def test_a_report_is_drawn_from_its_file_alone(watch: Callable[[], Watched], run_folder: Path, tmp_path: Path) -> None:
    with closing(ReplayStore.open(run_folder / "replay.sqlite", read_only=True)) as store:
        ((run,),) = rows(run_folder / "replay.sqlite", f"select id from runs where id <> '{OTHER}'")
        path = report_run(store, tmp_path / "report.html", run=run)
    watched = watch()
    page = watched.page
    page.goto(path.as_uri())
    page.locator(".chart canvas").nth(9).wait_for()
    assert page.locator("main h1").inner_text() == f"{NAME}-001"
    assert values(page, "drift").count() == ITERATIONS
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate(FAINT) == []
    assert watched.requests == [path.as_uri()]
    watched.requests.clear()


PRINTED = """() => {
  const cut = (e) => e.getBoundingClientRect().right > innerWidth + 1 || e.scrollWidth > e.clientWidth + 1;
  const isBox = (e) => e.checkVisibility() && getComputedStyle(e).display !== "inline";
  const shown = [...document.querySelectorAll("main *")].filter(isBox);
  const cards = [...document.querySelectorAll(".panel, .tile, .scroll:has(#iterations)")];
  const canvas = document.querySelector("#panel-success canvas");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return {
    cut: shown.filter(cut).map((e) => e.outerHTML.slice(0, 80)),
    split: cards.filter((e) => getComputedStyle(e).breakInside !== "avoid").length,
    ink: pixels.filter((value, at) => at % 4 === 0 && value < 60 && pixels[at + 2] < 60 && pixels[at + 3] > 200).length,
  };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_is_whole_and_legible_on_paper(
    watch: Callable[[], Watched], run_folder: Path, tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    ((run,),) = rows(run_folder / "replay.sqlite", f"select id from runs where id <> '{OTHER}'")
    with closing(ReplayStore.open(run_folder / "replay.sqlite", read_only=True)) as store:
        path = report_run(store, tmp_path / "report.html", run=run)
    watched = watch()
    page = watched.page
    page.emulate_media(color_scheme=scheme)
    page.goto(path.as_uri())
    page.locator(".chart canvas").nth(9).wait_for()
    widths = "[...document.querySelectorAll('canvas')].map((e) => e.width)"
    page.evaluate(f"addEventListener('beforeprint', () => {{ window.widths = {widths}; }})")
    page.pdf(format="A4")
    assert set(page.evaluate("widths")) == {315}  # two charts beside each other between the margins of A4
    page.emulate_media(media="print", color_scheme=scheme)
    page.set_viewport_size({"width": 703, "height": 1000})
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    found = page.evaluate(PRINTED)
    assert (found["cut"], found["split"]) == ([], 0)
    assert found["ink"] > 50, "the held-out curve must be dark on paper"
    watched.requests.clear()


def test_curve_of_several_runs_says_where_its_value_stands(page: Page, server: Served, run_folder: Path) -> None:
    ((run,),) = rows(run_folder / "replay.sqlite", f"select id from runs where id <> '{OTHER}'")
    page.goto(server.address + address(all=1, show=[run, OTHER], one=[run, OTHER]))
    legend = page.locator("#panel-gradient-norm .legend")
    # The other run made two iterations, and the mean ends where the shorter ends.
    legend.get_by_text("and 1 other").wait_for()
    assert legend.locator("b").inner_text().endswith("at iteration 2")


VISIBLE = """async (texts) => {
  const { visibleText } = await import("/static/scales.js");
  return texts.map(visibleText);
}"""


def test_scripts_and_templates_write_out_the_same_characters(page: Page, server: Served) -> None:
    page.goto(server.address + "/buffer")
    # A browser may know a newer Unicode than Python, and halves of characters meet only in Python.
    known = [each for each in map(chr, range(0x110000)) if unicodedata.category(each) not in ("Cn", "Cs")]
    texts = ["".join(known[at : at + 97]) for at in range(0, len(known), 97)]
    found = zip(texts, page.evaluate(VISIBLE, texts), strict=True)
    assert [ascii(text)[:200] for text, shown in found if shown != visible_text(text)] == []
