"""Distributions as bars: server-side SVG whose bars can be links, so that a picture filters without a script.

Colours and hover come from `static/bars.css`. Nothing is drawn with a style attribute, and every text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from replay.pages.templating import visible_text

Tone = Literal["plain", "fresh", "replay"]
"""The stream that is counted."""

_GLYPH = 6.2
"""Pixels: the greatest width of a character of the axis."""
_AXIS = 18
"""Pixels: height of the line of labels."""
_HEAD = 14
"""Pixels: height of the line with the largest count."""
_WIDEST = 60.0
"""Pixels: width of a bar where there are few."""
_LEAST = 2.0
"""Pixels: height of a bar that is not empty; one row of a hundred thousand is still to be seen."""


@dataclass(frozen=True)
class Bar:
    label: str
    """What is counted: a name, or a range such as `0.5 - 0.75`."""
    count: float
    href: str | None = None
    """Where a click or Enter leads; None: it is no link."""
    title: str | None = None
    """Shown on hover and read to people who can't see; None: label and count."""
    selected: bool = False


def bars(
    bars: Sequence[Bar],
    *,
    summary: str,
    tone: Tone = "plain",
    largest: float | None = None,
    unit: str = "",
    size: tuple[int, int] = (320, 96),
) -> Markup:
    """One bar per entry, side by side. `summary` says in words what the picture shows.

    `largest`: the count of a bar of full height, for pictures that are compared; None: the largest count there is.
    Labels that would touch their left neighbour are left out. `size` in pixels; narrower places shrink the picture.
    """
    width, height = size
    peak = max([bar.count for bar in bars], default=0.0)
    top = largest or peak or 1.0
    slot = min(_WIDEST, width / max(1, len(bars)))
    parts = [_bar(bar, at * slot, slot, share=min(1.0, bar.count / top), height=height) for at, bar in enumerate(bars)]
    floor = height - _AXIS
    parts.append(Markup('<line class="axis" x1="0" x2="{}" y1="{y}" y2="{y}"/>').format(width, y=floor))
    parts += _labels([visible_text(bar.label) for bar in bars], slot, width=width, height=height)
    if peak or largest:
        most = f"max {_count_text(peak)}" if largest is None else _count_text(top)
        parts.append(Markup('<text class="peak" x="0" y="10">{}{}</text>').format(most, unit))
    return Markup(
        '<svg class="bars {tone}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="{role}" aria-label="{summary}">{inner}</svg>'
    ).format(
        tone=tone,
        width=width,
        height=height,
        role="group" if any(bar.href for bar in bars) else "img",
        summary=visible_text(summary),
        inner=Markup("").join(parts),
    )


def _bar(bar: Bar, left: float, slot: float, *, share: float, height: int) -> Markup:
    """A bar in a column as high as the picture, all of which can be hit."""
    floor = height - _AXIS
    tall = max(share * (floor - _HEAD), _LEAST) if bar.count > 0 else 0.0
    gap = min(1.0, slot * 0.15)
    column = Markup(
        "<title>{title}</title>"
        '<rect class="hit" x="{left:.2f}" y="0" width="{slot:.2f}" height="{floor}"/>'
        '<rect class="bar" x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{tall:.2f}"/>'
    ).format(
        title=visible_text(bar.title or f"{bar.label}: {_count_text(bar.count)}"),
        left=left,
        slot=slot,
        floor=floor,
        x=left + gap / 2,
        y=floor - tall,
        w=slot - gap,
        tall=tall,
    )
    chosen = Markup(' class="selected"') if bar.selected else Markup("")
    if bar.href is None:
        return Markup("<g{}>{}</g>").format(chosen, column)
    current = Markup(' aria-current="true"') if bar.selected else Markup("")
    return Markup('<a href="{}"{}{}>{}</a>').format(bar.href, chosen, current, column)


def _labels(labels: Sequence[str], slot: float, *, width: int, height: int) -> list[Markup]:
    """Those that fit, each kept within the picture."""
    drawn: list[Markup] = []
    free = 0.0
    for at, label in enumerate(labels):
        half = len(label) * _GLYPH / 2
        centre = min(max((at + 0.5) * slot, half), width - half)
        if label and centre - half >= free:
            free = centre + half + _GLYPH
            drawn.append(Markup('<text class="tick" x="{:.1f}" y="{}">{}</text>').format(centre, height - 5, label))
    return drawn


def _count_text(count: float) -> str:
    return f"{count:,.0f}" if count == int(count) else f"{count:.3g}"
