"""The panels of two runs laid over each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from replay.report.panels import Metrics, Panel, PanelGroup, panel_groups
from replay.report.svg import Curve

_MOST_CURVES = 2
"""Of one run's panel: more of them, twice, are not told apart."""


def overlaid(first: Metrics, second: Metrics) -> tuple[PanelGroup, ...]:
    """Every panel of lines with the curves of both: the first run's as in its own page, the second's dashed.

    What a run's own page dashes, such as limits and plans, is left out; so are bars.
    """
    groups = []
    for ours, theirs in zip(panel_groups(first, {}), panel_groups(second, {}), strict=True):
        pairs = zip(ours.panels, theirs.panels, strict=True)
        panels = tuple(_both(*pair) for pair in pairs if pair[0].kind == "lines" and _few(pair))
        groups.append(PanelGroup(ours.title, panels))
    return tuple(group for group in groups if group.panels)


def _few(pair: Sequence[Panel]) -> bool:
    return max(len(_solid(panel)) for panel in pair) <= _MOST_CURVES


def _both(ours: Panel, theirs: Panel) -> Panel:
    curves = [replace(curve, label=f"A {curve.label}") for curve in _solid(ours)]
    curves += [replace(curve, label=f"B {curve.label}", dashed=True) for curve in _solid(theirs)]
    return replace(ours, curves=tuple(curves))


def _solid(panel: Panel) -> list[Curve]:
    return [curve for curve in panel.curves if not curve.dashed]
