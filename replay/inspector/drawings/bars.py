"""Distributions as bars: server-side SVG whose bars can be links, so that a picture filters without a script.

Colours and hover come from `static/bars.css`. Nothing is drawn with a style attribute, and every text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from replay.inspector.text.written_out import visible_text

Tone = Literal["plain", "fresh", "replay"]
"""Which stream is counted."""

_GLYPH = 6.2
"""Widest a character of the axis is, in pixels."""
_AXIS = 18
"""Height of the line of labels."""
_HEAD = 14
"""Height of the line that tells the largest count."""
_GUTTER = 38
"""Width of the counts beside logarithmic bars."""
_WIDEST = 60.0
"""A bar, where there are few."""
_LEAST = 2.0
"""Height of a bar that is not empty: one row of a hundred thousand is still to be seen."""


@dataclass(frozen=True)
class Bar:
    label: str
    """What is counted: a name, or a range such as `0.5 - 0.75`."""
    count: float
    href: str | None = None
    """Where a click or Enter leads; None: it is no link."""
    title: str | None = None
    """Shown on hover and read to who can't see; None: label and count."""
    selected: bool = False


@dataclass(frozen=True)
class Tick:
    """A label below the axis at a place of its own, for bars that are ranges."""

    at: float
    """In bars from the left end: 0 is the left edge of the first one, 1 its right edge."""
    label: str


@dataclass(frozen=True)
class Height:
    """What a bar's height says."""

    largest: float | None = None
    """The count a bar of full height has, for pictures that are compared; None: the largest one there is."""
    decades: int | None = None
    """None: heights go from 0. Else they are logarithmic, so many decades up to `largest`, with lines between them."""
    unit: str = ""
    """The unit of the counts."""

    def of(self, count: float, top: float) -> float:
        """Share of the full height; what lies below the decades has none."""
        if self.decades is None or count <= 0:
            return min(1.0, count / top)
        return min(1.0, max(0.0, 1 + math.log10(count / top) / self.decades))


def bars(
    bars: Sequence[Bar],
    *,
    summary: str,
    tone: Tone = "plain",
    ticks: Sequence[Tick] | None = None,
    height: Height = Height(),
    size: tuple[int, int] = (320, 96),
) -> Markup:
    """One bar per entry, side by side. `summary` says in words what the picture shows.

    `ticks` take the place of the bars' labels below the axis; labels that would touch their left neighbour are left
    out. `height`: how counts become heights. `size`: width and height in pixels, which narrower places shrink.
    """
    width, tall = size
    peak = max([bar.count for bar in bars], default=0.0)
    top = height.largest or peak or 1.0
    gutter = _GUTTER if height.decades else 0
    room = width - gutter
    slot = min(_WIDEST, room / max(1, len(bars)))
    marks = [Tick(i + 0.5, visible_text(bar.label)) for i, bar in enumerate(bars)] if ticks is None else ticks
    parts = [_bar(bar, i * slot, slot, share=height.of(bar.count, top), height=tall) for i, bar in enumerate(bars)]
    parts += [_axis(room, tall), *_labels(marks, slot, width=room, height=tall)]
    if gutter:
        shifted = Markup('<g transform="translate({} 0)">{}</g>').format(gutter, Markup("").join(parts))
        parts = [*_decades(height, top, width=width, floor=tall - _AXIS), shifted]
    elif peak or height.largest:
        most = f"max {_count_text(peak)}" if height.largest is None else _count_text(top)
        parts.append(Markup('<text class="peak" x="0" y="10">{}{}</text>').format(most, height.unit))
    linked = any(bar.href for bar in bars)
    return Markup(
        '<svg class="bars {tone}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="{role}" aria-label="{summary}">{inner}</svg>'
    ).format(
        tone=tone,
        width=width,
        height=tall,
        role="group" if linked else "img",
        summary=visible_text(summary),
        inner=Markup("").join(parts),
    )


def _bar(bar: Bar, left: float, slot: float, *, share: float, height: int) -> Markup:
    """A bar in a column as high as the picture, all of which can be hit."""
    floor, room = height - _AXIS, height - _AXIS - _HEAD
    tall = share * room
    tall = max(tall, _LEAST) if bar.count > 0 else 0.0
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


def _decades(height: Height, top: float, *, width: int, floor: int) -> list[Markup]:
    """A line and its count for each but the lowest, which is the axis."""
    assert height.decades is not None
    line = Markup(
        '<line class="decade" x1="{left}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/>'
        '<text class="count" x="{end}" y="{base:.1f}">{count}{unit}</text>'
    )
    places = [(top / 10**step, _HEAD + (floor - _HEAD) * step / height.decades) for step in range(height.decades)]
    return [
        line.format(left=_GUTTER, width=width, y=y, end=_GUTTER - 4, base=y + 3.5, count=f"{count:g}", unit=height.unit)
        for count, y in places
    ]


def _axis(width: int, height: int) -> Markup:
    floor = height - _AXIS
    return Markup('<line class="axis" x1="0" x2="{}" y1="{y}" y2="{y}"/>').format(width, y=floor)


def _labels(marks: Sequence[Tick], slot: float, *, width: int, height: int) -> list[Markup]:
    """Those that fit, each kept within the picture."""
    drawn: list[Markup] = []
    free = 0.0
    for mark in marks:
        half = len(mark.label) * _GLYPH / 2
        centre = min(max(mark.at * slot, half), width - half)
        if not mark.label or centre - half < free:
            continue
        free = centre + half + _GLYPH
        drawn.append(
            Markup('<text class="tick" x="{:.1f}" y="{}">{}</text>').format(centre, height - 5, mark.label),
        )
    return drawn


def _count_text(count: float) -> str:
    return f"{count:,.0f}" if count == int(count) else f"{count:.3g}"
