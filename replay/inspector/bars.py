"""Distributions as bars: server-side SVG whose bars can be links, so that a picture filters without a script.

Colours and hover come from `static/bars.css`. Nothing is drawn with a style attribute, and every text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

Tone = Literal["plain", "fresh", "replay"]
"""Which stream is counted."""

_GLYPH = 6.2
"""Widest a character of the axis is, in pixels."""
_AXIS = 18
"""Height of the line of labels."""
_HEAD = 14
"""Height of the line that tells the largest count."""
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


def bars(
    bars: Sequence[Bar],
    *,
    summary: str,
    tone: Tone = "plain",
    ticks: Sequence[Tick] | None = None,
    largest: float | None = None,
    size: tuple[int, int] = (320, 96),
) -> Markup:
    """One bar per entry, side by side. `summary` says in words what the picture shows.

    `ticks` take the place of the bars' labels below the axis; labels that would touch their left neighbour are left
    out. `largest`: the count a bar of full height has, for pictures that are compared; None: the largest one here.
    `size`: width and height in pixels; narrower places shrink it.
    """
    width, height = size
    peak = max([bar.count for bar in bars], default=0.0)
    top = largest or peak or 1.0
    slot = width / max(1, len(bars))
    marks = [Tick(i + 0.5, bar.label) for i, bar in enumerate(bars)] if ticks is None else ticks
    parts = [_bar(bar, i * slot, slot, share=bar.count / top, height=height) for i, bar in enumerate(bars)]
    parts += [_axis(width, height), *_labels(marks, slot, width=width, height=height)]
    if peak:
        parts.append(Markup('<text class="peak" x="0" y="10">max {}</text>').format(_told(peak)))
    linked = any(bar.href for bar in bars)
    return Markup(
        '<svg class="bars {tone}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="{role}" aria-label="{summary}">{inner}</svg>'
    ).format(
        tone=tone,
        width=width,
        height=height,
        role="group" if linked else "img",
        summary=summary,
        inner=Markup("").join(parts),
    )


def _bar(bar: Bar, left: float, slot: float, *, share: float, height: int) -> Markup:
    """A bar in a column as high as the picture, all of which can be hit."""
    floor, room = height - _AXIS, height - _AXIS - _HEAD
    tall = min(1.0, share) * room
    tall = max(tall, _LEAST) if bar.count > 0 else 0.0
    gap = min(1.0, slot * 0.15)
    column = Markup(
        "<title>{title}</title>"
        '<rect class="hit" x="{left:.2f}" y="0" width="{slot:.2f}" height="{floor}"/>'
        '<rect class="bar" x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{tall:.2f}"/>'
    ).format(
        title=bar.title or f"{bar.label}: {_told(bar.count)}",
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


def _told(count: float) -> str:
    return f"{count:,.0f}" if count == int(count) else f"{count:.3g}"
