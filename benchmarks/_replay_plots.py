"""Plots of docs/evidence.md as SVG files: curves over fresh episodes, and what each arm took, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from benchmarks._replay_arms import BUDGET, TARGET
from benchmarks._replay_figures import Costs, interval, recent_curve
from benchmarks._replay_runs import Result
from replay.pages.charts import number

_STYLE = """
svg { --ink: #1c1d20; --soft: #5d6068; --grid: #dfdfda; background: #ffffff; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #ececea; --soft: #a3a6ae; --grid: #31343a; background: #1c1e22; }
}
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
.soft { fill: var(--soft); } .end { text-anchor: end; } .mid { text-anchor: middle; }
.grid { stroke: var(--grid); } .target { stroke: var(--soft); stroke-dasharray: 2 4; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; } .seed { fill: none; } .span { stroke-width: 2.5; }
"""
_COLOURS = ("#0072b2", "#c95d00", "#00795a", "#8a4fbf", "#b8860b", "#b8485c", "#4a9cc9", "#7d7f2a")
_ROW, _LEFT, _PANEL, _GAP = 26, 230, 250, 40
_STEP = 64
"""Fresh episodes between points of a mean curve."""
_MOST_CURVES = 6


def colours(arms: Sequence[str]) -> dict[str, str]:
    return {arm: _COLOURS[place % len(_COLOURS)] for place, arm in enumerate(arms)}


def mean_curves(by_arm: Mapping[str, Sequence[Result]], titles: Mapping[str, str], summary: str) -> str:
    """Success of the newest fresh episodes, mean of the runs; one that ended keeps its last evaluations' success."""
    left, right, top, bottom, width, height = 48, 230, 16, 34, 780, 330
    fresh = range(0, BUDGET + 1, _STEP)

    def x(value: float) -> float:
        return left + value / BUDGET * (width - left - right)

    def y(value: float) -> float:
        return height - bottom - value * (height - top - bottom)

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>')
        parts.append(f'<text class="soft end" x="{left - 6}" y="{y(share) + 4:.1f}">{share:.0%}</text>')
    parts.append(f'<line class="target" x1="{left}" x2="{width - right}" y1="{y(TARGET):.1f}" y2="{y(TARGET):.1f}"/>')
    for tick in range(0, BUDGET + 1, 1024):
        parts.append(f'<text class="soft mid" x="{x(tick):.1f}" y="{height - 14}">{tick:,}</text>')
    parts.append(f'<text class="soft" x="{width - right + 24}" y="{height - 14}">fresh episodes</text>')
    shown = list(by_arm)[:_MOST_CURVES]
    for place, arm in enumerate(shown):
        mean = np.mean([np.interp(fresh, *recent_curve(result)) for result in by_arm[arm]], axis=0)
        path = "M" + "L".join(f"{x(f):.1f} {y(m):.1f}" for f, m in zip(fresh, mean, strict=True))
        colour = colours(shown)[arm]
        parts.append(f'<path class="curve" stroke="{colour}" d="{path}"/>')
        row = top + 12 + 20 * place
        parts.append(f'<circle cx="{width - right + 16}" cy="{row - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{width - right + 28}" y="{row}">{escape(titles[arm])}</text>')
    return _svg(parts, width, height, summary)


def intervals(panels: Mapping[str, Mapping[str, Costs]], titles: Mapping[str, str], summary: str) -> str:
    """One panel per quantity, one row per arm: every seed a ring, the median a dot with its interval.

    Seeds that did not get there stand at the right edge as triangles.
    """
    arms = list(next(iter(panels.values())))
    width = _LEFT + len(panels) * _PANEL + (len(panels) - 1) * _GAP + 30
    height = 40 + _ROW * len(arms) + 26
    parts = [
        f'<text class="end" x="{_LEFT - 14}" y="{40 + _ROW * row + 17}">{escape(titles[arm])}</text>'
        for row, arm in enumerate(arms)
    ]
    for place, (name, by_arm) in enumerate(panels.items()):
        parts += _panel(_LEFT + place * (_PANEL + _GAP), name, by_arm, colours(arms))
    return _svg(parts, width, height, summary)


def _panel(left: float, name: str, by_arm: Mapping[str, Costs], colour: Mapping[str, str]) -> list[str]:
    most = 1.08 * max((v for values in by_arm.values() for v in values.values() if v < math.inf), default=1.0)
    floor = 40 + _ROW * len(by_arm)

    def x(value: float) -> float:
        return left + min(value / most, 1.0) * (_PANEL - 12)

    step = next(s for s in (m * 10**e for e in range(5) for m in (1, 2, 5)) if most / s <= 5)
    parts = [f'<text class="soft" x="{left}" y="20">{escape(name)}</text>']
    for tick in range(0, int(most) + 1, step):
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="32" y2="{floor}"/>')
        parts.append(f'<text class="soft mid" x="{x(tick):.1f}" y="{floor + 18}">{tick:,}</text>')
    for row, (arm, values) in enumerate(by_arm.items()):
        y, stroke = 40 + _ROW * row + 13, colour[arm]
        for value in values.values():
            if value == math.inf:
                edge = left + _PANEL - 4
                parts.append(f'<path fill="{stroke}" d="M{edge - 8} {y - 5}L{edge} {y}L{edge - 8} {y + 5}Z"/>')
            else:
                parts.append(f'<circle class="seed" stroke="{stroke}" cx="{x(value):.1f}" cy="{y}" r="3"/>')
        if values:
            found = interval(values)
            told = escape(f"{number(found.median)} [{number(found.low)}, {number(found.high)}]")
            parts.append(
                f'<line class="span" stroke="{stroke}" x1="{x(found.low):.1f}" x2="{x(found.high):.1f}" '
                f'y1="{y}" y2="{y}"><title>{told}</title></line>'
            )
            if found.median < math.inf:
                parts.append(f'<circle fill="{stroke}" cx="{x(found.median):.1f}" cy="{y}" r="5"/>')
    return parts


def _svg(parts: Sequence[str], width: float, height: float, summary: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
        f'aria-label="{escape(summary, quote=True)}">\n<style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )
