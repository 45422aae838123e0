"""A trajectory, read: what was said, its tokens and their numbers, the updates that used it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.browser.demonstration import OTHER
from tests.browser.legible import FAINT
from tests.fakes.runs import rows
from tests.replay.pages.serving import Served

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
def found(run_folder: Path) -> dict[str, str]:
    """Ids of trajectories: scored with several segments, never scored, drawn again and again."""
    database = run_folder / "replay.sqlite"
    mine = f"run <> '{OTHER}'"
    scored = f"""select s.trajectory from segments s join trajectories t on t.id = s.trajectory where {mine}
        and s.trajectory in (select trajectory from token_scores) and t.num_tool_calls > 1
        group by 1 order by count(*) desc, 1 limit 1"""
    unscored = f"""select id from trajectories where {mine} and id not in (select trajectory from token_scores)
        order by id limit 1"""
    drawn = f"select trajectory from draws where {mine} group by 1 order by count(*) desc, 1 limit 1"
    return {
        name: str(rows(database, query)[0][0])
        for name, query in {"scored": scored, "unscored": unscored, "drawn": drawn}.items()
    }


def twin(server: Served, target: str) -> Any:
    return json.loads(server.ask(target).text)


def detail(page: Page) -> dict[str, str]:
    """The numbers of the chosen token, by name."""
    page.locator("#detail dl").wait_for()
    pairs = "[...document.querySelectorAll('#detail dt')].map((e) => [e.textContent, e.nextElementSibling.textContent])"
    return dict(page.evaluate(pairs))


def test_a_conversation_shows_who_said_what(page: Page, server: Served, found: dict[str, str]) -> None:
    page.goto(f"{server.address}/trajectories/{found['scored']}")
    said = twin(server, f"/trajectories/{found['scored']}.json")["messages"]
    shown = page.locator(".said")
    assert shown.count() == len(said)
    assert page.locator(".said.by-env").count() == sum(message["author"] == "env" for message in said)
    calls = [message for message in said if message["tool_calls"]]
    assert page.locator(".said.by-llm", has_text="measure").count() == len(calls) > 1


def test_a_clicked_token_tells_its_numbers_and_the_address_remembers_it(
    page: Page, server: Served, found: dict[str, str]
) -> None:
    tokens = twin(server, f"/trajectories/{found['scored']}/tokens.json?segment=0")
    at = tokens["action_mask"].index(True)
    page.goto(f"{server.address}/trajectories/{found['scored']}")
    page.get_by_role("link", name="Tokens").click()
    page.locator(f'.t[data-at="{at}"]').click()
    behavior, current = (tokens[name][at] for name in ("behavior_log_probs", "current_log_probs"))
    told = detail(page)
    assert told["id"] == str(tokens["token_ids"][at])
    assert told["author"].endswith("llm") and told["mask"] == "trained"
    assert told["behavior"].startswith(f"{behavior:.4f} nats".replace("-", "\u2212"))
    assert told["current"].startswith(f"{current:.4f} nats".replace("-", "\u2212"))
    assert float(told["drift"]) == pytest.approx(math.exp(current - behavior), abs=1e-4)
    assert f"token={at}" in page.url
    page.keyboard.press("ArrowRight")
    page.wait_for_url(f"**token={at + 1}*")
    page.reload()
    assert detail(page)["id"] == str(tokens["token_ids"][at + 1])


def test_the_card_of_a_token_can_be_put_away(page: Page, server: Served, found: dict[str, str]) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{server.address}/trajectories/{found['scored']}?view=tokens&token=3")
    card = page.locator("#detail")
    for put_away in (card.get_by_role("button", name="close").click, lambda: page.keyboard.press("Escape")):
        page.locator('.t[data-at="3"]').click()
        card.locator("dl").wait_for()
        put_away()
        card.wait_for(state="hidden")
        assert "token=" not in page.url and page.locator(".t.chosen").count() == 0


def test_a_token_under_the_mouse_tells_its_numbers(page: Page, server: Served, found: dict[str, str]) -> None:
    page.goto(f"{server.address}/trajectories/{found['scored']}?view=tokens")
    page.locator('.t[data-at="1"]').hover()
    assert "author" in page.locator("#tip").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_can_be_read_in_every_colour(page: Page, server: Served, found: dict[str, str], scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{server.address}/trajectories/{found['scored']}?view=tokens&segment=0")
    page.locator('.t[data-at="0"]').wait_for()
    for number, color in enumerate(COLORS, start=1):
        page.keyboard.press(str(number))
        page.locator(f'#tokens[data-color="{color}"]').wait_for()
        assert page.evaluate(FAINT) == [], color
        assert f"color={color}" in page.url
    page.evaluate(EVERY_COLOR)
    assert page.evaluate(FAINT) == []


def test_every_other_segment_says_why_it_was_begun(page: Page, server: Served, found: dict[str, str]) -> None:
    page.goto(f"{server.address}/trajectories/{found['scored']}?view=tokens")
    page.get_by_role("navigation", name="Segments").get_by_role("link", name="1", exact=True).click()
    page.wait_for_url("**segment=1*")
    assert "strategy rewrite" in page.locator(".why").inner_text()
    assert "parts from the conversation before it at token" in page.locator(".parting").inner_text()


def test_what_was_never_scored_names_the_command_that_scores_it(
    page: Page, server: Served, found: dict[str, str]
) -> None:
    page.goto(f"{server.address}/trajectories/{found['unscored']}?view=tokens")
    assert "never scored" in page.locator(".unscored").inner_text()
    command = page.locator("#rescore").inner_text()
    assert command.startswith("agentloop replay rescore ") and found["unscored"] in command
    page.locator('[data-copy="#rescore"]').click()
    page.get_by_role("button", name="copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == command


def test_two_trajectories_are_compared_from_the_first_token_that_differs(
    page: Page, server: Served, found: dict[str, str]
) -> None:
    page.goto(f"{server.address}/trajectories/{found['scored']}")
    page.get_by_text("compare with").click()
    page.locator(".beside a").first.click()
    page.wait_for_url("**/compare*")
    ids = [parse_qs(urlsplit(page.url).query)[name][0] for name in "ab"]
    assert ids[0] == found["scored"]
    texts, tokens = [], []
    for letter, id in zip("AB", ids, strict=True):
        tokens.append(twin(server, f"/trajectories/{id}/tokens.json?segment=0"))
        marked = page.locator(f"#first-difference-{letter}")
        assert marked.count() == 1
        texts.append((page.evaluate("(e) => getComputedStyle(e).outlineStyle", marked.element_handle()), marked))
    sides = zip(*(each["token_ids"] for each in tokens), strict=False)
    same = next(place for place, (ours, theirs) in enumerate(sides) if ours != theirs)
    assert [style for style, _ in texts] == ["solid", "solid"]
    assert f"part at token {same} of segment 0" in page.locator("main").inner_text()
    for (_, marked), each in zip(texts, tokens, strict=True):
        assert str(each["token_ids"][same]) in (marked.get_attribute("title") or "")


def test_every_draw_is_a_line_and_a_point(page: Page, server: Served, found: dict[str, str], run_folder: Path) -> None:
    query = f"""select iteration, drift_mean from draws where trajectory = '{found["drawn"]}' and state = 'committed'
        order by iteration, slot"""
    used = rows(run_folder / "replay.sqlite", query)
    page.goto(f"{server.address}/trajectories/{found['drawn']}?view=updates")
    cells = [row.split("\t") for row in page.locator("main table tbody[data-rows] tr").all_inner_texts()]
    assert [(int(row[0]), row[5]) for row in cells] == [(iteration, f"{drift:.4f}") for iteration, drift in used]
    assert len(used) > 2
    page.locator(".chart canvas").nth(2).wait_for()
