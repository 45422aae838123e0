"""The report as one HTML page: nothing is fetched, nothing runs, all text is escaped."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from importlib.resources import files

from replay.report.headline import Config, setting
from replay.report.panel_json import in_words, measured
from replay.report.panels import Metrics, Panel, PanelGroup, panel_groups, why_absent
from replay.report.svg import Curve, bar_chart, line_chart, marker, number
from replay.report.tiles import Tile, Word, tiles

# No script, no image, no font and no request, whatever a name or a config value may contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
# Fresh is blue and replay orange (Okabe and Ito's palette, safe for colour-blind readers); the streams also differ by
# marker. The colours of stacked bars are Paul Tol's.
_STYLE = files("replay.report").joinpath("report.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class ReportData:
    """All that the page tells."""

    name: str
    code_version: str
    metrics: Metrics
    """Series by metric name, (iteration, value) ascending."""
    config_text: str
    """The configuration as people read it."""
    config: Config
    """As stored with the run."""


def render_report(data: ReportData) -> str:
    """The whole page."""
    groups = panel_groups(data.metrics, data.config)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(data.name)} - agentloop report</title>",
            f"<style>\n{_STYLE}</style>\n</head>\n<body>\n<main>",
            _header(data),
            *(_group(group) for group in groups),
            "<details>\n<summary>Configuration</summary>\n"
            f'<pre tabindex="0">{escape(data.config_text)}</pre>\n</details>',
            f"<footer>Written by agentloop {escape(data.code_version)}.</footer>",
            "</main>\n</body>\n</html>\n",
        ]
    )


def _header(data: ReportData) -> str:
    words = setting(data.config)
    line = f'<p class="setting">{escape(words)}</p>\n' if words else ""
    return (
        f'<header>\n<p class="eyebrow">agentloop report</p>\n<h1>{escape(data.name)}</h1>\n{line}'
        f'<div class="tiles">\n{"".join(_tile(tile) for tile in tiles(data.metrics, data.config))}</div>\n'
        '<p class="legend-note">Bold in a legend: the value at the last iteration. Hover over a chart for every value.'
        "</p>\n</header>"
    )


def _tile(tile: Tile) -> str:
    kind = "tile hero" if tile.hero else "tile"
    value = " ".join(_word(word) for word in tile.words)
    return (
        f'<div class="{kind}"><div class="name">{escape(tile.name)}</div><div class="value">{value}</div>'
        f'{_stream_bar(tile.streams)}<div class="note">{escape(tile.note)}</div></div>\n'
    )


def _word(word: Word) -> str:
    unit = f" <small>{escape(word.unit)}</small>" if word.unit else ""
    return f'<span class="{word.kind}">{escape(word.text)}{unit}</span>'


def _stream_bar(streams: tuple[float, float] | None) -> str:
    if streams is None:
        return ""
    parts = [(stream, rows) for stream, rows in zip(("fresh", "replay"), streams, strict=True) if rows]
    bar = "".join(f'<span class="{stream}" style="flex:{rows:g}"></span>' for stream, rows in parts)
    return f'<div class="share">{bar}</div>'


def _group(group: PanelGroup) -> str:
    panels = "\n".join(_figure(panel) for panel in group.panels)
    return f'<section>\n<h2>{escape(group.title)}</h2>\n<div class="panels">\n{panels}\n</div>\n</section>'


def _figure(panel: Panel) -> str:
    """A chart with its title, how to read it, and its legend."""
    head = f'<figcaption><h3>{escape(panel.title)}</h3><p class="how">{escape(panel.how)}</p></figcaption>'
    curves, summary = measured(panel), in_words(panel)
    if not curves:
        return f'<figure class="panel">{head}{_missing(panel)}</figure>'
    listed = [*panel.curves, panel.steps] if panel.steps else panel.curves
    legend = "".join(_legend_item(curve, panel) for curve in listed)
    if panel.kind == "bars":
        steps = panel.steps if panel.steps and panel.steps.series else None
        chart = bar_chart(curves, panel.axis, steps=steps, summary=summary)
    else:
        chart = line_chart(curves, panel.axis, summary=summary)
    return f'<figure class="panel">{head}<ul class="legend">{legend}</ul>{chart}</figure>'


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
