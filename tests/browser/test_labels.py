"""Labels and the link to a view, by keyboard, in a browser that sends what browsers send."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from replay.open_buffer import open_buffer
from replay.pages.app import create_app
from tests.browser.conftest import Watched
from tests.fakes.records import new_store, put, trajectory
from tests.replay.pages.serving import served


def test_a_label_is_made_by_keys_and_a_link_is_copied(watch: Callable[[], Watched], tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    with closing(new_store(path)) as store:
        put(store, trajectory("one"), trajectory("two"))
    with open_buffer(str(path)) as source, served(create_app(source)) as server:
        page = watch().page
        page.goto(f"{server.address}/trajectories/one")
        page.locator("#labels summary").press("Enter")
        page.get_by_label("label", exact=True).fill("good")
        page.get_by_label("note").fill("looked it up first")
        page.keyboard.press("Enter")
        page.locator("#labels", has_text="looked it up first").wait_for()
        page.locator("#labels a", has_text="good").press("Enter")
        page.wait_for_url("**/buffer?*")  # up to its scripts, which answer the button
        assert page.locator("table.list tbody tr").count() == 1
        page.get_by_role("button", name="copy link").press("Enter")
        page.get_by_role("button", name="copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == page.url
        page.goto(f"{server.address}/trajectories/one")
        page.get_by_role("button", name="Remove the label good").press("Enter")
        page.locator("#labels", has_text="looked it up first").wait_for(state="detached")
        page.close()  # before its server ends
