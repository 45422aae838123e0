"""Distributions as bars."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

from replay.pages.templating import environment

_HEIGHT = 96 - 18 - 14
"""Pixels of a full bar: the picture without its labels and the line above the bars."""


def bars(*shown: dict[str, Any], summary: str = "letters", **more: Any) -> str:
    picture = environment().get_template("bars.html").module.picture  # type: ignore[attr-defined]
    return str(picture(list(shown), summary, **more))


def bar(label: str, count: float, **more: Any) -> dict[str, Any]:
    return {"label": label, "count": count, **more}


def _heights(svg: str) -> list[float]:
    return [float(tall) for tall in re.findall(r'class="bar"[^>]*height="([0-9.]+)"', svg)]


def test_bars_are_as_high_as_their_counts_and_the_smallest_stays_visible() -> None:
    svg = bars(bar("a", 4), bar("b", 1), bar("c", 0), bar("d", 0.001))
    assert _heights(svg) == [_HEIGHT, _HEIGHT / 4, 0.0, 2.0]
    assert _heights(bars(bar("a", 4), bar("b", 16), largest=8)) == [_HEIGHT / 2, _HEIGHT]  # pictures to one scale


def test_bars_that_lead_somewhere_are_links_and_the_chosen_one_says_so() -> None:
    hostile = '"><script>alert(1)</script>'
    svg = bars(bar("a", 3, href="/buffer?x=1&y=2", selected=True), bar("b", 1200), bar(hostile, 1), summary=hostile)
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == hostile and not list(root.iter("script")) and "style=" not in svg
    (link,) = root.iter("a")
    assert (link.get("href"), link.get("aria-current"), root.get("role")) == ("/buffer?x=1&y=2", "true", "group")
    assert [title.text for title in root.iter("title")] == ["a: 3", "b: 1,200", f"{hostile}: 1"]


def test_bars_leave_out_labels_that_would_touch_and_keep_the_others_inside() -> None:
    svg = bars(*(bar(f"label {i:02d}", 1) for i in range(32)))
    places = [float(x) for x in re.findall(r'class="tick" x="([0-9.]+)"', svg)]
    # 8 characters of at most 6.2 pixels and one free: none nearer than 55.8 to the next, half of one from the edge.
    assert 2 <= len(places) <= 6
    assert min(b - a for a, b in pairwise(places)) >= 55.8
    assert min(places) >= 24.8
    assert max(places) <= 320 - 24.8
