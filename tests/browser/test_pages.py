"""Every page, in a real browser: it renders, fits, and can be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from replay.open_buffer import open_buffer
from replay.pages.addresses import address
from replay.pages.app import create_app, create_folder_app
from replay.pages.views.runs_page import OpenedRuns
from tests.browser.demonstration import OTHER
from tests.browser.legible import FAINT, found_by_axe, missed_by_tab
from tests.fakes.records import RUN, a_run, new_store
from tests.fakes.runs import rows
from tests.replay.pages.serving import Served, missing_pages, page_addresses, served

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

SIZES = [(1280, 800), (390, 844)]


def demonstrated(run_folder: Path) -> list[str]:
    """Addresses of all pages of the demonstration, without what scripts alone ask for."""
    database = run_folder / "replay.sqlite"
    (run,) = rows(database, f"select id from runs where id <> '{OTHER}'")[0]
    several = """select trajectory, task from segments join trajectories on trajectories.id = trajectory
        group by trajectory, task order by count(*) desc, trajectory limit 2"""
    (first, task), (second, _) = rows(database, several)
    ((held_out,),) = rows(database, "select task from held_out limit 1")
    targets = page_addresses((run, OTHER), task, [first, second], held_out=held_out)
    assert missing_pages(targets) == []
    return [target for target in targets if ".json" not in target]


def open_whole(page: Page, address: str) -> None:
    """Until all its parts are fetched and drawn."""
    page.goto(address)
    page.wait_for_function("() => !document.querySelector('.chart:not(:has(.legend)), [aria-busy=true], .loading')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_render_fit_and_can_be_read(page: Page, server: Served, run_folder: Path, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    for target in demonstrated(run_folder):
        page.set_viewport_size({"width": 1280, "height": 800})
        answer = page.goto(server.address + target, wait_until="load")
        assert answer is not None and answer.status == 200, target
        assert page.locator("main h1").inner_text().strip(), target
        assert page.title().endswith("agentloop"), target
        for width, height in SIZES:
            page.set_viewport_size({"width": width, "height": height})
            fits = page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            assert fits, (target, width)
        assert page.evaluate(FAINT) == [], target


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_axe_finds_nothing_on_any_page(
    page: Page, server: Served, run_folder: Path, scheme: Literal["light", "dark"], width: int
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    for target in [*demonstrated(run_folder), "/buffer?where=rewrd", "/buffer?where=reward>7"]:
        open_whole(page, server.address + target)
        assert found_by_axe(page) == [], target


def test_a_keyboard_reaches_every_action_and_shows_where_it_is(page: Page, server: Served, run_folder: Path) -> None:
    for target in demonstrated(run_folder):
        open_whole(page, server.address + target)
        assert missed_by_tab(page) == [], target


def test_the_list_of_a_folder_leads_into_a_run_whose_pages_work_below_its_address(page: Page, run_folder: Path) -> None:
    with closing(OpenedRuns(run_folder.parent)) as runs, served(create_folder_app(runs)) as server:
        page.goto(server.address)
        page.locator(".chart canvas").nth(2).wait_for()
        # A mark does not lead away.
        page.locator(".mark-run svg").click()
        assert page.locator("input[name=show]").is_checked() is False
        page.locator("td", has_text="0.1.0").click()
        page.locator("#progress", has_text="finished").wait_for()
        below = f"{server.address}/in/{run_folder.name}"
        assert page.url.startswith(f"{below}/runs/")
        page.get_by_role("link", name="Buffer").click()
        page.locator("#overview:not([aria-busy])").wait_for()
        page.locator("#where").fill("success")
        page.keyboard.press("Enter")
        page.wait_for_url(f"{below}/buffer?*where=success*")
        page.get_by_role("link", name="Mixing").click()
        page.locator("#set").fill("unit=group")
        page.keyboard.press("Enter")
        page.wait_for_url(f"{below}/mixing?*unit%3Dgroup*")
        page.locator("#copy-yaml").click()
        page.get_by_role("button", name="copied").wait_for()
        assert "unit: group" in page.evaluate("navigator.clipboard.readText()")
        page.get_by_role("link", name="Runs").click()
        page.wait_for_url(f"{server.address}/*")
        page.close()  # before its server ends


@pytest.fixture
def seeds(tmp_path: Path) -> Iterator[Served]:
    """Two runs of two iterations: one takes an hour for each, and the other one and a half."""
    database = tmp_path / "replay.sqlite"
    with closing(new_store(database)) as store:
        store.add_run(a_run(OTHER))
        for run, hours, rewards in ((RUN, 1.0, (0.0, 1.0)), (OTHER, 1.5, (0.4, 0.7))):
            for iteration, reward in enumerate(rewards, 1):
                store.add_metrics(run, iteration, {"time/iteration": 3600 * hours, "rollout/reward": reward})
        store.add_metrics(RUN, 1, {"rare": 1.0})
        store.add_metrics(OTHER, 2, {"rare": 3.0})
    with open_buffer(str(database)) as source, served(create_app(source)) as inspector:
        yield inspector


def table_of(page: Page, panel: str) -> list[list[str]]:
    page.locator(f"#panel-{panel} summary").click()
    found = page.locator(f"#panel-{panel} tbody tr")
    found.first.wait_for()
    return [row.split("\t") for row in found.all_inner_texts()]


def test_runs_are_drawn_as_one_where_all_have_spent_as_much(page: Page, seeds: Served) -> None:
    both = {"all": 1, "show": [RUN, OTHER], "one": [RUN, OTHER], "metric": ["rollout/reward", "rare"]}
    page.goto(seeds.address + address(**both, over="hours"))
    # From where the later begins to where the shorter ends. Between two points a run is on its line.
    assert table_of(page, "metric-rollout-reward") == [
        ["3", "\u2013", "\u2013", "0.7"],
        ["2", "0.75 (0.5 to 1)", "1", "0.5"],
        ["1.5", "0.45 (0.4 to 0.5)", "0.5", "0.4"],
        ["1", "\u2013", "0", "\u2013"],
    ]
    page.goto(seeds.address + address(**both, smooth=2))
    assert [row[1] for row in table_of(page, "metric-rollout-reward")] == ["0.525 (0.5 to 0.55)", "0.2 (0 to 0.4)"]
    assert "its runs have no iterations in common" in page.locator("#panel-metric-rare .legend").inner_text()
    assert [row[2:] for row in table_of(page, "metric-rare")] == [["\u2013", "3"], ["1", "\u2013"]]
    page.get_by_label("curves over").select_option("hours")
    page.get_by_role("button", name="Compare the marked").click()
    page.wait_for_url("**over=hours*")
    assert "smooth=2" in page.url and "metric=rare" in page.url
    page.close()  # before its server ends


DRAWN_BY_CHARTS_ALONE = """() => import("/static/charts.js").then(() => new Promise((done) => {
  requestAnimationFrame(() => setTimeout(() => setTimeout(done)));
}))"""


def test_runs_are_drawn_as_asked_however_late_their_script_comes(page: Page, server: Served, run_folder: Path) -> None:
    ((run,),) = rows(run_folder / "replay.sqlite", f"select id from runs where id <> '{OTHER}'")
    late: list[Route] = []
    page.route("**/static/runs.js", lambda route: late.append(route))
    page.goto(server.address + address(all=1, show=[run, OTHER], over="episodes"), wait_until="commit")
    page.wait_for_function("() => typeof uPlot !== 'undefined' && document.getElementById('reading')")
    page.evaluate(DRAWN_BY_CHARTS_ALONE)
    late[0].continue_()
    legend = page.locator("#panel-reward .legend")
    legend.get_by_text("episodes").first.wait_for()
    assert "iteration" not in legend.inner_text()
