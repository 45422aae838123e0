"""The report's section on what other objectives would have done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from agentloop.analysis.whatif.result import ALL, Effect, PartData, WhatIf
from replay.report.page import figure
from replay.report.panels import Panel
from replay.report.svg import Axis, Curve, number

_COLOURS = 7
_DATA = ("rows", "tokens", "drift", "ESS")
_EFFECT = ("trained", "clipped", "above", "below", "ratio p01", "p50", "p99", "loss", "gradient norm")


def whatif_section(found: WhatIf) -> str:
    """Charts of clip share and ESS by staleness bucket, and a table of everything; markup."""
    places = tuple(part.bucket for part in found.data if part.bucket != ALL)
    panels = [figure(panel) for panel in _panels(found, places) if any(curve.series for curve in panel.curves)]
    rows = found.data[-1].trajectories
    seen = f"{rows:,} trajectories ({found.rows}), policy {found.version}; their advantages are {found.advantages}."
    notes = "".join(f'<p class="legend-note">{escape(note)}</p>' for note in _notes(found))
    return (
        "<section>\n<h2>What would other objectives have done?</h2>\n"
        f'<p class="how">{escape(seen)} One optimizer step of each objective, alone on the rows of a staleness bucket '
        "and on all of them; none was made. Bold in a legend: the last bucket.</p>\n"
        f'<div class="panels">\n{"".join(panels)}\n</div>\n'
        f'<div class="numbers">{_table(found)}</div>\n{notes}</section>'
    )


def _panels(found: WhatIf, places: tuple[str, ...]) -> list[Panel]:
    def across(value: Callable[[Effect], float | None]) -> tuple[Curve, ...]:
        curves = []
        for index, objective in enumerate(found.objectives):
            effects = [(place, value(found.effect(objective.name, bucket))) for place, bucket in enumerate(places)]
            series = [(place, share) for place, share in effects if share is not None]
            curves.append(Curve(objective.name, series, f"s{index % _COLOURS}"))
        return tuple(curves)

    ess = [(place, part.ess) for place, part in enumerate(found.data) if part.bucket != ALL]
    return [
        Panel(
            "Clip share by staleness",
            "Trained tokens whose loss a bound decides: rows of that age teach so much less.",
            across(lambda effect: effect.clipped),
            Axis("share of trained tokens", True, from_zero=True, least_span=0.01, across="staleness", places=places),
        ),
        Panel(
            "Effective sample size by staleness",
            "The same for every objective. Below 50 % (dotted line) half of the rows of that age are lost to drift.",
            (Curve("all objectives", [(place, value) for place, value in ess if value is not None], "ink"),),
            Axis("share of the bucket's rows", True, True, reference=0.5, across="staleness", places=places),
        ),
    ]


def _notes(found: WhatIf) -> list[str]:
    left = [f"Left out: {part.count:,}, {part.why}." for part in found.left_out]
    losses = [f"{v.name}: fresh {v.fresh}; replay {v.replay}." for v in found.objectives]
    return [*losses, *left, *(f"{note[0].upper()}{note[1:]}." for note in found.notes)]


def _table(found: WhatIf) -> str:
    first = found.objectives[0].name
    titles = ["staleness", *_DATA, "objective", *_EFFECT, *([f"cosine with {first}"] if found.objectives[1:] else [])]
    lines = [_line(titles, "th", text=(0, 1 + len(_DATA)))]
    for part in found.data:
        for objective in found.objectives:
            cells = [*_data_cells(part), *_effect_cells(found.effect(objective.name, part.bucket))]
            if found.objectives[1:]:
                cells.append(_told(found.effect(objective.name, part.bucket).cosines[first]))
            lines.append(_line(cells, "td", text=(0, 1 + len(_DATA))))
    return f"<table>\n{''.join(lines)}</table>"


def _data_cells(part: PartData) -> list[str]:
    return [part.bucket, f"{part.trajectories:,}", f"{part.tokens:,}", _told(part.drift_mean), _share(part.ess)]


def _effect_cells(effect: Effect) -> list[str]:
    shares = [_share(value) for value in (effect.clipped, effect.clipped_above, effect.clipped_below)]
    ratios = (effect.ratio_p01, effect.ratio_p50, effect.ratio_p99)
    numbers = [_told(value) for value in (*ratios, effect.loss, effect.gradient_norm)]
    return [effect.objective, f"{effect.trained_tokens:,}", *shares, *numbers]


def _line(cells: Sequence[str], tag: str, *, text: Sequence[int]) -> str:
    kinds = [' class="text"' if place in text else "" for place in range(len(cells))]
    inner = "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
    return f"<tr>{inner}</tr>\n"


def _told(value: float | None) -> str:
    return "-" if value is None else number(value)


def _share(value: float | None) -> str:
    return "-" if value is None else number(value, percent=True)
