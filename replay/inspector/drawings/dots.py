"""The members of a group on a line, each where its advantage is: server-side SVG, colours from `static/bars.css`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from replay.inspector.text.written_out import visible_text

_RADIUS = 3.0
_SIDE = 5.2
"""The side of a square."""
_APART = 7.0
"""Pixels between the middles of dots that have the same place."""
_MARGIN = 20.0
"""Beside the outermost places, for dots that share one."""
_SIZE = 300, 26
_ROWS = 3
"""Above each other, before a further column is begun."""


@dataclass(frozen=True)
class Dot:
    at: float
    """Its advantage."""
    filled: bool
    """True: a success; hollow otherwise, so that colour is not needed to tell."""
    stream: str
    """fresh: a circle. replay: a square."""
    title: str
    href: str


def strip(dots: Sequence[Dot], *, extent: float, summary: str) -> Markup:
    """Places from -extent to extent, 0 in the middle; dots of one place stand beside each other."""
    width, height = _SIZE
    room = width / 2 - _MARGIN
    at_place: dict[float, list[Dot]] = defaultdict(list)
    for dot in sorted(dots, key=lambda dot: (dot.at, dot.filled)):
        at_place[round(dot.at / extent * room) if extent else 0.0].append(dot)
    shapes = []
    for place, there in at_place.items():
        columns = -(-len(there) // _ROWS)
        apart = min(_APART, room / columns)
        for index, dot in enumerate(there):
            column, row = divmod(index, _ROWS)
            x = width / 2 + place + (column - (columns - 1) / 2) * apart
            y = height / 2 + (row - (min(_ROWS, len(there)) - 1) / 2) * _APART
            shapes.append(_shape(dot, min(max(x, _RADIUS + 1), width - _RADIUS - 1), y))
    return Markup(
        '<svg class="strip" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="group" '
        'aria-label="{summary}"><line class="axis" x1="0" x2="{width}" y1="{y}" y2="{y}"/>'
        '<line class="zero" x1="{middle}" x2="{middle}" y1="2" y2="{low}"/>{shapes}</svg>'
    ).format(
        width=width,
        height=height,
        summary=visible_text(summary),
        y=height / 2,
        middle=width / 2,
        low=height - 2,
        shapes=Markup("").join(shapes),
    )


def _shape(dot: Dot, x: float, y: float) -> Markup:
    kind = Markup("{} {}").format(dot.stream, "filled" if dot.filled else "hollow")
    if dot.stream == "fresh":
        shape = Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{}"/>').format(kind, x, y, _RADIUS)
    else:
        corner = (x - _SIDE / 2, y - _SIDE / 2, _SIDE, _SIDE)
        shape = Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{}" height="{}"/>').format(kind, *corner)
    return Markup('<a href="{}"><title>{}</title>{}</a>').format(dot.href, visible_text(dot.title), shape)
