"""Histograms of ratios and drift as pictures that are compared: one scale for all of a quantity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup

from replay.inspector.drawings.bars import Bar, Height, Tick, Tone, bars
from replay.queries import QueryResult
from replay.records import REPLAY
from replay.storage.format.ratio_histograms import Counts, Scale, merged, quantile, scale_for

_FACTORS = (1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0, 100.0, 1000.0, 10000.0)
"""Labelled on both sides of 1, where there is room."""
_ROOM = 42
"""Pixels from one label to the next."""
_SIZE = (300, 118)
_HEIGHT = Height(largest=100.0, decades=4, unit=" %")
"""Tails of one token in a thousand are what is looked for, beside a bar that holds nearly all."""


@dataclass(frozen=True)
class Picture:
    stream: str
    age: str
    """Empty: all ages of the stream."""
    tokens: int
    quantiles: tuple[float | None, float | None, float | None]
    """1, 50 and 99 percent."""
    drawing: Markup


@dataclass(frozen=True)
class Spread:
    quantity: str
    pictures: tuple[Picture, ...]
    """One of each stream and, where the replayed rows are of different ages, of each age, the youngest first."""


def spreads(histograms: Sequence[QueryResult]) -> list[Spread]:
    """The histograms of each quantity that was measured, ratios first."""
    found = []
    for quantity in ("ratio", "drift"):
        own = [
            (h["stream"], h["age"], np.array(h["counts"], np.int64)) for h in histograms if h["quantity"] == quantity
        ]
        if own:
            found.append(_spread(quantity, own))
    return found


def _spread(quantity: str, own: Sequence[tuple[str, str, Counts]]) -> Spread:
    streams: tuple[Tone, ...] = ("fresh", "replay")
    whole = {stream: merged(counts for name, _, counts in own if name == stream) for stream in streams}
    whole = {stream: counts for stream, counts in whole.items() if counts.any()}
    aged = [(age, counts) for stream, age, counts in own if stream == REPLAY and counts.any()]
    aged = aged if len(aged) > 1 else []
    scale = scale_for([*whole.values(), *(counts for _, counts in aged)])
    return Spread(
        quantity,
        tuple(
            [_picture(quantity, stream, "", counts, scale) for stream, counts in whole.items()]
            + [_picture(quantity, "replay", age, counts, scale) for age, counts in aged]
        ),
    )


def _picture(quantity: str, stream: Tone, age: str, counts: Counts, scale: Scale) -> Picture:
    tokens = int(counts.sum())
    edges = [0.0, *(math.exp(edge) for edge in scale.edges), math.inf]
    drawn = [
        Bar(name, 100 * int(number) / tokens, title=f"{name}: {number:,} tokens, {int(number) / tokens:.2%}")
        for number, name in zip(scale.of(counts), map(_named, pairwise(edges)), strict=True)
    ]
    low, middle, high = (quantile(counts, share) for share in (0.01, 0.5, 0.99))
    whose = f"{stream} rows" + (f" of age {age}" if age else "")
    summary = (
        f"{quantity} of {tokens:,} tokens of {whose}: half are below {middle:.3g}, 98 % from {low:.3g} to {high:.3g}"
    )
    drawing = bars(drawn, summary=summary, tone=stream, ticks=_ticks(scale), height=_HEIGHT, size=_SIZE)
    return Picture(stream, age, tokens, (low, middle, high), drawing)


def _named(edges: tuple[float, float]) -> str:
    lower, upper = edges
    if math.isinf(upper):
        return f"above {lower:.3g}"
    return f"{lower:.3g} to {upper:.3g}" if lower else f"below {upper:.3g}"


def _ticks(scale: Scale) -> list[Tick]:
    """1 in the middle, and factors of it on both sides."""
    edges = scale.edges
    bin_width = edges[1] - edges[0]
    pixels = _SIZE[0] / (len(edges) + 1) / bin_width
    logs, last = [0.0], 0.0
    for factor in _FACTORS:
        log = math.log(factor)
        if (log - last) * pixels >= _ROOM and log <= edges[-1]:
            logs, last = [-log, *logs, log], log
    # One bin stands before the first edge.
    return [Tick(1 + (log - edges[0]) / bin_width, _factor(log)) for log in logs]


def _factor(log: float) -> str:
    if log == 0.0:
        return "1"
    return f"{math.exp(log):.{3 if log > 0 else 2}g}\u00d7"
