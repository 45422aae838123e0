"""What scripts of the pages do to text, compared with what templates do; and tokens by the hundred thousand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from replay.inspector.text.written_out import visible, visible_text

from context.authors import ENV, LLM, TEMPLATE
from context.tokens.codec import TokenCodec
from context.tokens.token_sequence import Segment
from replay import ReplayStore
from replay.pages.app import create_app
from replay.pages.reading import spelled
from replay.queries.open_buffer import OpenBuffer
from tests.fakes.records import group, new_store, task, tokens, trajectory
from tests.replay.pages.hostile import SPOKEN
from tests.replay.pages.serving import Served, served

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

EACH = """async (codes) => {
  const { visibleText } = await import("/static/visible.js");
  return codes.map((code) => visibleText(String.fromCodePoint(code)));
}"""
SHOWN = """async (text) => {
  const { visible } = await import("/static/visible.js");
  const box = document.createElement("div");
  box.append(visible(text));
  return box.innerHTML;
}"""


def ranges() -> list[tuple[int, int]]:
    table = json.loads(files("replay.inspector").joinpath("static/visible.json").read_text())
    return [(first, last) for first, last, _ in table["ranges"]]


def test_scripts_and_templates_mark_the_same_characters_alike(page: Page, server: Served) -> None:
    page.goto(server.address + "/buffer")
    edges = {code + step for row in ranges() for code in row for step in (-1, 0, 1)} | {
        sum(row) // 2 for row in ranges()
    }
    codes = sorted(code for code in edges if 0 <= code < 0x110000)
    assert page.evaluate(EACH, codes) == [visible_text(chr(code)) for code in codes]
    # Python keeps the two halves of a character apart, and JavaScript does not: none of them meet here.
    text = SPOKEN.encode("utf-8", "replace").decode()
    assert page.evaluate(SHOWN, text) == page.evaluate(
        "(html) => { const box = document.createElement('div'); box.innerHTML = html; return box.innerHTML; }",
        str(visible(text)),
    )


@pytest.fixture
def codec(run_folder: Path) -> TokenCodec:
    return TokenCodec((run_folder / "model" / "tokenizer.json").read_text())


@pytest.fixture
def ids(codec: TokenCodec) -> list[int]:
    return codec.encode_text("The fence of plot 7 is 12 metres long.\n  ") * 20_000


@pytest.fixture
def big(codec: TokenCodec, ids: list[int], tmp_path: Path) -> Iterator[str]:
    """The address of a trajectory of 500 turns of 200 tokens."""
    stretch = [TEMPLATE] * 10 + [LLM] * 90 + [TEMPLATE] * 10 + [ENV] * 90
    writers = stretch * 500
    row = trajectory("many", segments=(Segment(tokens(ids[:100_000], writers, log_prob=-1e-5)),), num_turns=500)
    path = tmp_path / "replay.sqlite"
    with closing(new_store(path)) as store:
        store.append([task()], [group()], [row])
    with (
        closing(ReplayStore.open(path, read_only=True)) as store,
        served(create_app(OpenBuffer(store, tokenizer=lambda: codec))) as server,
    ):
        yield f"{server.address}/trajectories/many"


def test_a_hundred_thousand_tokens_open_a_block_at_a_time(
    big: str, codec: TokenCodec, ids: list[int], page: Page
) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{big}?view=tokens&color=behavior")
    page.locator('.t[data-at="0"]').wait_for()
    assert page.locator(".block").count() == 49  # 100,000 / 2,048
    assert sum("tokens.json" in address for address in asked) <= 2
    assert page.locator('.t[data-at="5"]').inner_html() == spelled(codec.decode([ids[5]]))
    page.goto(f"{big}?segment=0&token=77777")
    page.locator('.t.chosen[data-at="77777"]').wait_for()
    assert page.locator(".t").count() <= 6 * 2_048
    top = page.evaluate("document.querySelector('.chosen').getBoundingClientRect().top")
    assert 0 < top < 800
    page.keyboard.press("End")
    page.locator('.t.chosen[data-at="99999"]').wait_for()
    assert "turn" in page.locator("#detail").inner_text()


def test_an_arrow_goes_no_further_than_to_tokens_that_are_still_to_come(big: str, page: Page) -> None:
    page.goto(f"{big}?segment=0&token=77777")
    page.locator('.t.chosen[data-at="77777"]').wait_for()
    page.wait_for_load_state("networkidle")
    held: list[Route] = []
    page.route("**/tokens.json?*", lambda route: held.append(route))
    at, before = 77777, 0
    while at != before:
        before = at
        page.keyboard.press("ArrowUp")
        at = page.evaluate("Number(document.querySelector('.chosen').dataset.at)")
    assert held and 60_000 < at < 77_777
    for route in held:
        route.continue_()
    page.locator(f'.t.chosen[data-at="{at - 1}"]').wait_for()
