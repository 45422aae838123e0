"""The report as one HTML page: nothing is fetched, nothing runs, all text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from agentloop.config import RunConfig
from agentloop.report.chart import Curve, Series, bar_chart, line_chart, marker, number
from agentloop.report.panels import Metrics, Panel, PanelGroup, finite, panel_groups, why_absent
from agentloop.report.style import STYLE

# No script, no image, no font and no request, whatever a name or a config value may contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class ReportData:
    """All that the page tells."""

    name: str
    code_version: str
    metrics: Metrics
    """Series by metric name, (iteration, value) ascending."""
    config_text: str
    config: RunConfig | None = None
    """None: written by a version whose configuration this one can't read."""
    further: tuple[str, ...] = ()
    """Markup of sections below the panels."""


def render_report(data: ReportData) -> str:
    """The whole page."""
    groups = panel_groups(data.metrics, data.config)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(data.name)} - agentloop report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            _header(data),
            *(_group(group) for group in groups),
            *data.further,
            "<details>\n<summary>Configuration</summary>\n"
            f'<pre tabindex="0">{escape(data.config_text)}</pre>\n</details>',
            f"<footer>Written by agentloop {escape(data.code_version)}.</footer>",
            "</main>\n</body>\n</html>\n",
        ]
    )


def duration(seconds: float) -> str:
    """`48 s`, `1 min 48 s`, `3 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _header(data: ReportData) -> str:
    metrics = data.metrics
    limit = data.config.run.iterations if data.config else None
    tiles = [_success_tile(finite(metrics, "eval/success")), _time_tile(metrics, limit), _rows_tile(metrics)]
    setting = f'<p class="setting">{escape(_setting(data.config))}</p>\n' if data.config else ""
    return (
        f'<header>\n<p class="eyebrow">agentloop report</p>\n<h1>{escape(data.name)}</h1>\n{setting}'
        f'<div class="tiles">\n{"".join(tiles)}</div>\n'
        '<p class="legend-note">Bold in a legend: the value at the last iteration. Hover over a chart for every value.'
        "</p>\n</header>"
    )


def _setting(config: RunConfig) -> str:
    """What makes this run this run, in one line."""
    replay, target = config.replay, config.run.stop_at_success
    shares = dict.fromkeys((config.replay_fraction(1), config.replay_fraction(config.run.iterations)))
    drawn = " falling to " if list(shares)[-1] < replay.fraction else " rising to "
    told = drawn.join(number(share, percent=True) for share in shares)
    parts = [config.environment.name, f"seed {config.run.seed}"]
    use = ", observed only" if replay.mode == "observe" else ""
    unit = "" if replay.unit == "any" else f", unit {replay.unit}"
    parts.append(f"replay {told}{unit}, {replay.sampler} sampler{use}" if any(shares) else "no replay")
    if target is not None:
        parts.append(f"ends at {number(target, percent=True)} held-out success twice in a row")
    return " \u00b7 ".join(parts).replace(" %", "\u00a0%")


def _success_tile(held_out: Series) -> str:
    if not held_out:
        return _tile("held-out success", "not measured", "No evaluation was made in this run.", hero=True)
    if len(held_out) == 1:
        (iteration, success) = held_out[0]
        return _tile("held-out success", _percent(success), f"at iteration {iteration:,}, evaluated once", hero=True)
    start, end = held_out[0][1], held_out[-1][1]
    rising = ' class="rising"' if end > start else ""
    value = f'{_percent(start)} <span class="arrow">&rarr;</span> <span{rising}>{_percent(end)}</span>'
    note = f"from iteration {held_out[0][0]:,} to {held_out[-1][0]:,}, on tasks never trained on"
    return _tile("held-out success", value, note, hero=True)


def _time_tile(metrics: Metrics, limit: int | None) -> str:
    seconds = [value for _, value in finite(metrics, "time/iteration")]
    if not seconds:
        return _tile("training time", "not measured", "No iteration was finished.")
    of_limit = f" of at most {limit:,}" if limit is not None and len(seconds) < limit else ""
    each = duration(sum(seconds) / len(seconds))
    note = f"{len(seconds):,}{of_limit} iterations, {each} each, evaluations not counted"
    return _tile("training time", duration(sum(seconds)), note)


def _rows_tile(metrics: Metrics) -> str:
    fresh = sum(value for _, value in finite(metrics, "batch/fresh"))
    replay = sum(value for _, value in finite(metrics, "batch/replay"))
    total = fresh + replay
    if not total:
        return _tile("trajectories in batches", "none", "No iteration was finished.")
    bar = "".join(
        f'<span class="{stream}" style="flex:{rows:g}"></span>'
        for stream, rows in (("fresh", fresh), ("replay", replay))
        if rows
    )
    value = f"<span>{fresh:,.0f} <small>fresh</small></span> <span>+ {replay:,.0f} <small>replayed</small></span>"
    planned = sum(value for _, value in finite(metrics, "batch/planned_replay"))
    note = f"{_percent(replay / total)} from the buffer, configured {_percent(planned / total)}"
    return _tile("trajectories in batches", value, note, extra=f'<div class="share">{bar}</div>')


def _tile(name: str, value: str, note: str, *, hero: bool = False, extra: str = "") -> str:
    """`value` and `extra` are markup; `name` and `note` are text."""
    kind = "tile hero" if hero else "tile"
    return (
        f'<div class="{kind}"><div class="name">{escape(name)}</div><div class="value">{value}</div>{extra}'
        f'<div class="note">{escape(note)}</div></div>\n'
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _group(group: PanelGroup) -> str:
    panels = "\n".join(figure(panel) for panel in group.panels)
    return f'<section>\n<h2>{escape(group.title)}</h2>\n<div class="panels">\n{panels}\n</div>\n</section>'


def figure(panel: Panel) -> str:
    """A chart with its title, how to read it, and its legend."""
    head = f'<figcaption><h3>{escape(panel.title)}</h3><p class="how">{escape(panel.how)}</p></figcaption>'
    measured = [curve for curve in panel.curves if curve.series]
    if not measured:
        return f'<figure class="panel">{head}{_missing(panel)}</figure>'
    legend = "".join(_legend_item(curve, panel) for curve in _listed(panel))
    summary = _summary(panel, measured)
    if panel.kind == "bars":
        steps = panel.steps if panel.steps and panel.steps.series else None
        chart = bar_chart(measured, panel.axis, steps=steps, summary=summary)
    else:
        chart = line_chart(measured, panel.axis, summary=summary)
    return f'<figure class="panel">{head}<ul class="legend">{legend}</ul>{chart}</figure>'


def _listed(panel: Panel) -> Sequence[Curve]:
    return [*panel.curves, panel.steps] if panel.steps else panel.curves


def _legend_item(curve: Curve, panel: Panel) -> str:
    if not curve.series:
        why = escape(why_absent(curve), quote=True)
        return f'<li class="absent" title="{why}">{escape(curve.label)}: not measured</li>'
    last = number(curve.series[-1][1], percent=panel.axis.percent)
    return f"<li>{_swatch(curve, panel)}{escape(curve.label)} <b>{escape(last)}</b></li>"


def _swatch(curve: Curve, panel: Panel) -> str:
    if panel.kind == "bars" and curve is not panel.steps:
        bar = f'<rect class="bar {curve.role}" width="12" height="12"/>'
        return f'<svg class="swatch square" viewBox="0 0 12 12" aria-hidden="true">{bar}</svg>'
    style = " dashed" if curve.dashed else ""
    point = "" if curve.dashed or curve is panel.steps else marker(12, 6, curve.role, curve.marker)
    drawing = f'<path class="curve {curve.role}{style}" d="M1 6H23"/>{point}'
    return f'<svg class="swatch" viewBox="0 0 24 12" aria-hidden="true">{drawing}</svg>'


def _missing(panel: Panel) -> str:
    why = why_absent(panel.curves[0]) if panel.curves else "No finished iteration logged it."
    flat = '<svg viewBox="0 0 72 30" aria-hidden="true"><path d="M2 22C14 22 16 8 27 8S42 20 51 20 60 14 70 14"/></svg>'
    return f'<div class="missing">{flat}<strong>Not measured in this run</strong><span>{escape(why)}</span></div>'


def _summary(panel: Panel, measured: Sequence[Curve]) -> str:
    """The chart in words, for those who can't see it."""
    told = []
    for curve in measured:
        first, last = curve.series[0], curve.series[-1]
        values = [number(point[1], percent=panel.axis.percent) for point in (first, last)]
        places = [panel.axis.place(point[0]) for point in (first, last)]
        told.append(f"{curve.label} from {values[0]} at {panel.axis.across} {places[0]} to {values[1]} at {places[1]}")
    return f"{panel.title}: {'; '.join(told)}."
