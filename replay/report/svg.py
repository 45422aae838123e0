"""Line and bar charts as inline SVG: pure functions from numbers to text.

A chart is drawn in user units and scales with its column; colours come from the page's style. Hovering anywhere
over an iteration tells its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

Series = Sequence[tuple[int, float]]
"""(iteration, value), ascending."""

WIDTH, HEIGHT = 560.0, 254.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 10.0, 26.0, 28.0
_MOST_POINTS = 240
_MOST_MARKED = 45


@dataclass(frozen=True)
class Curve:
    """One line of a chart, or one layer of its bars."""

    label: str
    series: Series
    role: str
    """CSS class that gives the colour: `fresh`, `replay`, `held-out`, `s0` .. `s6`."""
    dashed: bool = False
    marker: Literal["circle", "square"] = "circle"
    peak: bool = False
    """True: where iterations are merged, the largest value is shown instead of the mean."""


@dataclass(frozen=True)
class Axis:
    """What the vertical axis shows; the horizontal one counts iterations."""

    unit: str = ""
    """What is counted, written above the axis."""
    percent: bool = False
    """True: shares, shown in percent."""
    whole: bool = False
    """True: fixed from 0 to 1, so that runs compare at a glance."""
    from_zero: bool = False
    reference: float | None = None
    """A thin horizontal line: the value that means `nothing happened`, or a limit."""
    least_span: float = 0.0
    """The scale never spans less, so that rounding noise does not look like a signal."""
    log_if_wide: bool = False
    """True: logarithmic once the values span more than a factor of 10."""


def line_chart(curves: Sequence[Curve], axis: Axis, *, summary: str) -> str:
    """Curves over iterations on one vertical scale."""
    first, last, merged = _extent(curves)
    thinned = [(curve, _thin(curve.series, first, merged, max if curve.peak else _mean)) for curve in curves]
    scale = _VerticalScale.of([value for _, points in thinned for _, value in points], axis)
    x = _x_scale(first, last, margin=8.0)
    parts = [_frame(scale, axis, _iteration_ticks(first, last), x)]
    for curve, points in thinned:
        places = [(x(iteration), scale.y(value)) for iteration, value in points]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
        style = " dashed" if curve.dashed else ""
        parts.append(f'<path class="curve {curve.role}{style}" d="{path}"/>')
        if len(places) == 1 or (len(places) <= _MOST_MARKED and not curve.dashed):
            parts += [marker(px, py, curve.role, curve.marker) for px, py in places]
    parts.append(_hover(thinned, x, merged, axis))
    return _svg(parts, summary)


def bar_chart(layers: Sequence[Curve], axis: Axis, *, summary: str, steps: Curve | None = None) -> str:
    """Layers stacked over each iteration, bottom first, with an optional stepped line across them."""
    first, last, merged = _extent(layers)
    everything = [*layers, steps] if steps else list(layers)
    thinned = [(curve, _thin(curve.series, first, merged, _mean)) for curve in everything]
    columns = sorted({iteration for _, points in thinned for iteration, _ in points})
    heights = dict.fromkeys(columns, 0.0)
    for _, points in thinned[: len(layers)]:
        for iteration, value in points:
            heights[iteration] += max(value, 0.0)
    scale = _VerticalScale.of([*heights.values(), *(value for _, value in (thinned[-1][1] if steps else []))], axis)
    slot = (WIDTH - LEFT - RIGHT) / max(1, math.ceil((last - first + 1) / merged))
    wide = min(0.82 * slot, 56.0)
    x = _x_scale(first, last, margin=slot / 2)
    parts = [_frame(scale, axis, _iteration_ticks(first, last), x)]
    below = dict.fromkeys(columns, 0.0)
    for layer, points in thinned[: len(layers)]:
        for iteration, value in points:
            if value <= 0:
                continue
            top, bottom = scale.y(below[iteration] + value), scale.y(below[iteration])
            below[iteration] += value
            parts.append(
                f'<rect class="bar {layer.role}" x="{x(iteration) - wide / 2:.1f}" y="{top:.1f}" '
                f'width="{wide:.1f}" height="{bottom - top:.1f}"/>'
            )
    if steps and thinned[-1][1]:
        path = "".join(
            f"{'M' if i == 0 else 'L'}{x(it) - slot / 2:.1f} {scale.y(v):.1f}H{x(it) + slot / 2:.1f}"
            for i, (it, v) in enumerate(thinned[-1][1])
        )
        # The halo keeps the line apart from bars of any colour, in light and dark.
        parts.append(f'<path class="halo" d="{path}"/><path class="curve {steps.role} steps" d="{path}"/>')
    parts.append(_hover(thinned, x, merged, axis))
    return _svg(parts, summary)


def marker(x: float, y: float, role: str, shape: str) -> str:
    """A point: round or square, so that streams differ by more than their colour."""
    if shape == "square":
        return f'<rect class="mark {role}" x="{x - 2.6:.1f}" y="{y - 2.6:.1f}" width="5.2" height="5.2"/>'
    return f'<circle class="mark {role}" cx="{x:.1f}" cy="{y:.1f}" r="2.8"/>'


def number(value: float, *, percent: bool = False) -> str:
    """A value for people: three significant digits, thousands apart; a share is 100 % only when nothing is missing."""
    if percent:
        rounded = f"{100 * value:.3g}"
        return f"{100 * value:.5g} %" if rounded == "100" else f"{rounded} %"
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class _VerticalScale:
    """Values to vertical places."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], axis: Axis) -> _VerticalScale:
        if axis.whole:
            return cls(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))
        shown = [*values, *([axis.reference] if axis.reference is not None else [])]
        low, high = min(shown), max(shown)
        if axis.log_if_wide and low > 0 and high / low > 10:
            return cls._logarithmic(low, high)
        if axis.from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if high - low <= max(axis.least_span, 1e-9 * max(abs(high), 1.0)):
            span = axis.least_span or 1.0
            low = low if axis.from_zero else (low + high - span) / 2
            high = low + span
        room = 0.06 * (high - low)
        low = low if axis.from_zero and low == 0 else low - room
        high = high if axis.from_zero and high == 0 and low < 0 else high + room
        return cls(low, high, tuple(_ticks(low, high)))

    @classmethod
    def _logarithmic(cls, low: float, high: float) -> _VerticalScale:
        """Ends on 1, 2 or 5 times a power of ten; a value a hair outside is drawn on the edge."""
        bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
        marks = [factor * 10.0**power for power in range(bottom, top + 1) for factor in (1, 2, 5)]
        low = max((mark for mark in marks if mark <= low * 1.01), default=marks[0])
        high = min(mark for mark in marks if mark >= high * 0.99)
        if high / low <= 100:
            return cls(low, high, tuple(mark for mark in marks if low <= mark <= high), log=True)
        every = max(1, math.ceil((top - bottom) / 5))
        return cls(low, high, tuple(m for m in marks[:: 3 * every] if low <= m <= high), log=True)

    def y(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(min(max(value, low), high))
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def tick_texts(self, *, percent: bool) -> list[str]:
        """As short as they can be while no two are alike."""
        factor, unit = (100.0, " %") if percent else (1.0, "")
        largest = max(map(abs, self.ticks))
        if not percent and not self.log and 1e4 <= largest < 1e9:
            factor, unit = (1e-3, "k") if largest < 1e6 else (1e-6, "M")
        scaled = [tick * factor if abs(tick) > 1e-12 else 0.0 for tick in self.ticks]
        for digits in range(4, 12):
            texts = [f"{tick:.{digits}g}{unit if tick or percent else ''}" for tick in scaled]
            if len(set(texts)) == len(texts):
                break
        return texts


def _ticks(low: float, high: float, most: int = 5) -> Iterable[float]:
    """Round numbers within [low, high], at most about `most`."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _iteration_ticks(first: int, last: int) -> list[int]:
    return sorted({round(tick) for tick in _ticks(first, last, most=6)}) if last > first else [first]


def _extent(curves: Sequence[Curve]) -> tuple[int, int, int]:
    """First and last iteration, and how many are merged into one point so that the page stays light."""
    iterations = [iteration for curve in curves for iteration, _ in curve.series]
    first, last = min(iterations), max(iterations)
    return first, last, max(1, math.ceil((last - first + 1) / _MOST_POINTS))


def _thin(series: Series, first: int, merged: int, combine: Callable[[list[float]], float]) -> Series:
    if merged == 1:
        return series
    buckets: dict[int, list[float]] = {}
    for iteration, value in series:
        buckets.setdefault((iteration - first) // merged, []).append(value)
    return [(first + bucket * merged, combine(values)) for bucket, values in buckets.items()]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _x_scale(first: int, last: int, *, margin: float) -> Callable[[int], float]:
    left, right = LEFT + margin, WIDTH - RIGHT - margin
    span = max(1, last - first)
    return lambda iteration: (left + right) / 2 if last == first else left + (iteration - first) / span * (right - left)


def _frame(scale: _VerticalScale, axis: Axis, iterations: Sequence[int], x: Callable[[int], float]) -> str:
    parts = [f'<text class="tick name" x="0" y="{TOP - 16}">{escape(axis.unit)}</text>'] if axis.unit else []
    for tick, text in zip(scale.ticks, scale.tick_texts(percent=axis.percent), strict=True):
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{y:.1f}" dy="0.32em">{text}</text>')
    if axis.reference is not None:
        y = scale.y(axis.reference)
        parts.append(f'<line class="reference" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    floor = HEIGHT - BOTTOM
    parts.append(f'<line class="floor" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>')
    parts.append(f'<text class="tick name end" x="{LEFT - 8}" y="{floor + 20}">iteration</text>')
    for iteration in iterations:
        parts.append(f'<text class="tick mid" x="{x(iteration):.1f}" y="{floor + 20}">{iteration:,}</text>')
    return "".join(parts)


def _hover(thinned: Sequence[tuple[Curve, Series]], x: Callable[[int], float], merged: int, axis: Axis) -> str:
    """An invisible column over every iteration that tells all values there."""
    labels: dict[int, list[str]] = {}
    for curve, points in thinned:
        for iteration, value in points:
            labels.setdefault(iteration, []).append(f"{curve.label}: {number(value, percent=axis.percent)}")
    columns = sorted(labels)
    edges = [(x(a) + x(b)) / 2 for a, b in pairwise(columns)]
    lefts, rights = [LEFT, *edges], [*edges, WIDTH - RIGHT]
    parts = []
    for column, left, right in zip(columns, lefts, rights, strict=True):
        name = f"iteration {column:,}" if merged == 1 else f"iterations {column:,}-{column + merged - 1:,}"
        title = escape("\n".join([name, *labels[column]]))
        parts.append(
            f'<rect class="hit" x="{left:.1f}" y="{TOP}" width="{max(right - left, 0.5):.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{title}</title></rect>'
        )
    return "".join(parts)


def _svg(parts: Iterable[str], summary: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" '
        f'aria-label="{escape(summary, quote=True)}">{"".join(parts)}</svg>'
    )
