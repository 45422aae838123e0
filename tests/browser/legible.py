"""What a page has that some people could not read or reach: each answers with a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from axe_playwright_python.sync_playwright import Axe

if TYPE_CHECKING:
    from playwright.sync_api import Page


def found_by_axe(page: Page) -> list[str]:
    """What axe-core finds wrong: names, headings, landmarks, contrast, links by colour alone and more."""
    violations = Axe().run(page).response["violations"]
    return [f"{each['id']}: {node['html'][:160]}" for each in violations for node in each["nodes"]]


def missed_by_tab(page: Page) -> list[str]:
    """Links and controls that the Tab key did not come to, or without a frame around them when it did."""
    for _ in range(page.evaluate(_WATCH_FOCUS) + 3):
        page.keyboard.press("Tab")
    found: list[str] = page.evaluate(_MISSED)
    return found


_WATCH_FOCUS = """() => {
  window.reached = new Set();
  window.unframed = [];
  document.addEventListener("focusin", ({target}) => {
    const part = target.querySelector(".hit") ?? target, style = getComputedStyle(part);
    reached.add(target);
    if (part === target ? style.outlineStyle === "none" : style.stroke === "none") unframed.push(target);
  });
  const all = 'a[href], button, input:not([type="hidden"]), select, textarea, summary, [tabindex="0"]';
  window.actions = [...document.querySelectorAll(all)].filter((e) => e.checkVisibility() && !e.disabled);
  return actions.length;
}"""
_MISSED = """() => [...actions.filter((e) => !reached.has(e)), ...unframed].map((e) => e.outerHTML.slice(0, 160))"""
