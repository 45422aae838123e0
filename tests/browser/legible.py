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

# Contrast of text with what is painted behind it, as WCAG computes it.
FAINT = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (css) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const behind = (e) => {
    const layers = [];
    for (; e; e = e.parentElement) {
      const paint = rgba(getComputedStyle(e).backgroundColor);
      if (paint[3] > 0) layers.push(paint);
      if (paint[3] === 1) break;
    }
    return layers.reverse().reduce((under, paint) => over(paint, under), [255, 255, 255]);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = new Map();
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !e.checkVisibility({opacityProperty: true})) continue;
    if (e.closest("[disabled], [aria-disabled=true], option")) continue;
    const style = getComputedStyle(e), ground = behind(e);
    const ink = e instanceof SVGElement ? style.fill : style.color;
    let opacity = 1; for (let p = e; p; p = p.parentElement) opacity *= +getComputedStyle(p).opacity;
    const paint = rgba(ink); paint[3] *= opacity;
    const a = light(over(paint, ground)), b = light(ground);
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.5 && +style.fontWeight >= 700);
    if (contrast < (large ? 3 : 4.5)) {
      const what = `${e.tagName.toLowerCase()}.${e.getAttribute("class") ?? ""} ${ink} on ${ground.map(Math.round)}`;
      faint.set(what, `${what}: ${contrast.toFixed(2)} (${walker.currentNode.data.trim().slice(0, 30)})`);
    }
  }
  return [...faint.values()];
}"""
