"""A trajectory, read: what was said, its tokens and their numbers, the updates that used it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from context.authors import ENV, LLM, TEMPLATE
from context.tokens.codec import TokenCodec
from context.tokens.token_sequence import Segment
from tests.browser.demonstration import OTHER
from tests.browser.legible import FAINT
from tests.fakes.records import new_store, put, tokens, trajectory
from tests.fakes.runs import rows
from tests.replay.pages.serving import Served, inspecting

if TYPE_CHECKING:
    from playwright.sync_api import Page

EVERY_COLOR = """() => {
  const classes = [...Array(8).keys()].map((i) => `q${i}`).concat([...Array(9).keys()].map((i) => `d${i}`));
  const line = document.querySelector("#tokens .line");
  for (const name of classes) {
    const token = Object.assign(document.createElement("span"), {className: `t ${name}`, textContent: name});
    line.append(token);
  }
}"""
COLORS = ["author", "mask", "behavior", "current", "drift", "advantage"]


@pytest.fixture(scope="module")
def scored(run_folder: Path) -> str:
    """The id of a scored trajectory with several segments."""
    query = f"""select s.trajectory from segments s join trajectories t on t.id = s.trajectory where run <> '{OTHER}'
        and s.trajectory in (select trajectory from token_scores) and t.num_tool_calls > 1
        group by 1 order by count(*) desc, 1 limit 1"""
    return str(rows(run_folder / "replay.sqlite", query)[0][0])


def detail(page: Page) -> dict[str, str]:
    """The numbers of the chosen token, by name."""
    page.locator("#detail dl").wait_for()
    pairs = "[...document.querySelectorAll('#detail dt')].map((e) => [e.textContent, e.nextElementSibling.textContent])"
    return dict(page.evaluate(pairs))


def test_a_clicked_token_shows_its_numbers_and_stands_in_the_address(page: Page, server: Served, scored: str) -> None:
    tokens: dict[str, Any] = json.loads(server.page(f"/trajectories/{scored}/tokens.json?segment=0"))
    at = tokens["action_mask"].index(True)
    page.goto(f"{server.address}/trajectories/{scored}")
    page.get_by_role("link", name="Tokens").click()
    page.locator(f'.t[data-at="{at}"]').click()
    behavior, current = (tokens[name][at] for name in ("behavior_log_probs", "current_log_probs"))
    shown = detail(page)
    assert shown["id"] == str(tokens["token_ids"][at])
    assert shown["author"].endswith("llm") and shown["mask"] == "trained"
    assert shown["behavior"].startswith(f"{behavior:.4f} nats".replace("-", "\u2212"))
    assert shown["current"].startswith(f"{current:.4f} nats".replace("-", "\u2212"))
    assert float(shown["drift"]) == pytest.approx(math.exp(current - behavior), abs=1e-4)
    assert f"token={at}" in page.url
    page.keyboard.press("ArrowRight")
    page.wait_for_url(f"**token={at + 1}*")
    page.reload()
    assert detail(page)["id"] == str(tokens["token_ids"][at + 1])


def test_a_word_says_who_wrote_each_run_of_tokens(page: Page, server: Served, scored: str) -> None:
    page.goto(f"{server.address}/trajectories/{scored}?view=tokens")
    page.locator('.t[data-at="0"]').wait_for()
    for name in ("chat template", "user", "policy, turn 0", "environment"):
        assert page.get_by_role("group", name=name, exact=True).first.locator(".t").count() > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_can_be_read_in_every_colour(page: Page, server: Served, scored: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{server.address}/trajectories/{scored}?view=tokens&segment=0")
    page.locator('.t[data-at="0"]').wait_for()
    for number, color in enumerate(COLORS, start=1):
        page.keyboard.press(str(number))
        page.locator(f'#tokens[data-color="{color}"]').wait_for()
        assert page.evaluate(FAINT) == [], color
        assert f"color={color}" in page.url
    page.evaluate(EVERY_COLOR)
    assert page.evaluate(FAINT) == []


@pytest.fixture
def big(run_folder: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address of a trajectory of 500 turns of 200 tokens, and how its sixth token is spelled."""
    codec = TokenCodec((run_folder / "model" / "tokenizer.json").read_text())
    ids = codec.encode_text("The fence of plot 7 is 12 metres long.\n  ") * 20_000
    stretch = [TEMPLATE] * 10 + [LLM] * 90 + [TEMPLATE] * 10 + [ENV] * 90
    row = trajectory("many", segments=(Segment(tokens(ids[:100_000], stretch * 500, log_prob=-1e-5)),), num_turns=500)
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        put(store, row)
    with inspecting(tmp_path / "replay.sqlite", tokenizer=lambda: codec) as server:
        yield f"{server.address}/trajectories/many", codec.decode([ids[5]])


def test_a_hundred_thousand_tokens_open_a_block_at_a_time(big: tuple[str, str], page: Page) -> None:
    address, sixth = big
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{address}?view=tokens&color=behavior")
    page.locator('.t[data-at="0"]').wait_for()
    assert page.locator(".block").count() == 49  # 100,000 / 2,048
    assert sum("tokens.json" in url for url in asked) <= 2
    assert page.locator('.t[data-at="5"]').inner_html() == sixth
    page.goto(f"{address}?segment=0&token=77777")
    page.locator('.t.chosen[data-at="77777"]').wait_for()
    assert page.locator(".t").count() <= 6 * 2_048
    top = page.evaluate("document.querySelector('.chosen').getBoundingClientRect().top")
    assert 0 < top < 800
    page.keyboard.press("End")
    page.locator('.t.chosen[data-at="99999"]').wait_for()
    assert "turn" in page.locator("#detail").inner_text()
