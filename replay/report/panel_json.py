"""A panel as plain values, for whoever draws it elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict

from replay.queries import QueryResult
from replay.report.panels import Panel, why_absent
from replay.report.svg import Curve, number


def plain_panel(panel: Panel, *, merged: int = 1, after: int | None = None) -> QueryResult:
    """Title, how to read it, axis and curves, `merged` places to a point; with `after`, only points beyond that place.

    A point of several places is named by the first, and is one of those if it reaches beyond.
    """
    first = None if after is None else after + 2 - merged
    return {
        "key": re.sub(r"[^a-z]+", "-", panel.title.lower()),
        "title": panel.title,
        "how": panel.how,
        "kind": panel.kind,
        "axis": asdict(panel.axis),
        "merged": merged,
        "curves": [_curve(curve, first) for curve in panel.curves],
        "steps": _curve(panel.steps, first) if panel.steps and panel.steps.series else None,
        "summary": in_words(panel),
    }


def in_words(panel: Panel) -> str:
    """The chart for those who can't see it."""
    found = []
    for curve in measured(panel):
        first, last = curve.series[0], curve.series[-1]
        values = [number(point[1], percent=panel.axis.percent) for point in (first, last)]
        found.append(f"{curve.label} from {values[0]} at iteration {first[0]:,} to {values[1]} at {last[0]:,}")
    return f"{panel.title}: {'; '.join(found) or 'not measured'}."


def measured(panel: Panel) -> Sequence[Curve]:
    """The curves that have points."""
    return [curve for curve in panel.curves if curve.series]


def _curve(curve: Curve, first: int | None) -> QueryResult:
    return {
        "label": curve.label,
        "role": curve.role,
        "dashed": curve.dashed,
        "marker": curve.marker,
        "points": [point for point in curve.series if first is None or point[0] >= first],
        "absent": None if curve.series else why_absent(curve),
    }
