"""Charts as data: curves over iterations, a panel for each question. `static/charts.js` draws them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from replay.questions.runs import Series

Config = Mapping[str, Any]
"""A run's configuration as it is stored."""
COLOURS = 7
"""Roles `s0` to `s6`."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart, or one layer of its bars."""

    label: str
    points: Series
    role: str
    """The colour, by its name in `static/style.css`: `fresh`, `replay`, `held-out`, `ink`, `s0` .. `s6`."""
    dashed: bool = False
    marker: Literal["circle", "square"] = "circle"


@dataclass(frozen=True)
class Axis:
    """The vertical axis; the horizontal one counts iterations."""

    unit: str = ""
    percent: bool = False
    """True: shares, shown in percent."""
    whole: bool = False
    """True: fixed from 0 to 1, so that runs can be compared at a glance."""
    from_zero: bool = False
    reference: float | None = None
    """A thin horizontal line: the value that means that nothing happened, or a limit."""
    least_span: float = 0.0
    """The scale never spans less, so that rounding noise does not look like a signal."""
    log_if_wide: bool = False
    """True: logarithmic where the values span more than a factor of 10."""


@dataclass(frozen=True)
class Panel:
    title: str
    how: str
    """One line on how to read it."""
    curves: Sequence[Curve]
    """Curves without a point are listed as not measured."""
    axis: Axis = Axis()
    kind: Literal["lines", "bars"] = "lines"
    steps: Curve | None = None
    """A stepped line over the bars."""


PanelGroups = Mapping[str, Sequence[Panel]]
"""Panels by the question that they answer, in reading order."""


def number(value: float, *, percent: bool = False) -> str:
    """A value for people: three significant digits, thousands apart; a share is 100 % only when nothing is missing."""
    if percent:
        rounded = f"{100 * value:.3g}"
        return f"{100 * value:.5g} %" if rounded == "100" else f"{rounded} %"
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plain_groups(groups: PanelGroups, *, merged: int) -> dict[str, Any]:
    """`groups` of panels as JSON, and `charts`, the same panels by their keys; `merged` iterations to a point."""
    plain = {title: [plain_panel(panel, merged) for panel in panels] for title, panels in groups.items()}
    return {"groups": plain, "charts": {panel["key"]: panel for panels in plain.values() for panel in panels}}


def plain_panel(panel: Panel, merged: int = 1) -> dict[str, Any]:
    return {
        **vars(panel),
        "key": re.sub(r"[^a-z]+", "-", panel.title.lower()),
        "axis": vars(panel.axis),
        "merged": merged,
        "curves": [{**vars(curve), "absent": _why_absent(curve)} for curve in panel.curves],
        "steps": vars(panel.steps) if panel.steps and panel.steps.points else None,
        "summary": _in_words(panel),
    }


def _why_absent(curve: Curve) -> str | None:
    if curve.points:
        return None
    if curve.role == "replay":
        return "Nothing was drawn from the buffer (replay.fraction was 0, or it was empty), or only to be observed."
    return "No finished iteration logged it."


def _in_words(panel: Panel) -> str:
    """The chart for people who can't see it."""
    found = []
    for curve in panel.curves:
        if curve.points:
            (first, start), (last, end) = curve.points[0], curve.points[-1]
            start_text, end_text = (number(value, percent=panel.axis.percent) for value in (start, end))
            found.append(f"{curve.label} from {start_text} at iteration {first:,} to {end_text} at {last:,}")
    return f"{panel.title}: {'; '.join(found) or 'not measured'}."
