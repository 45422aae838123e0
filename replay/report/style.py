"""The report's style sheet: system fonts, light and dark, one column on a phone.

Fresh is blue and replay orange (Okabe and Ito's palette, safe for colour-blind readers); the streams also differ by
marker. The colours of stacked bars are Paul Tol's.
"""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --ink: #1c1d20; --soft: #5d6068; --line: #e3e3de; --grid: #ecece8;
  --fresh: #0072b2; --replay: #c95d00; --held-out: #1c1d20; --good: #00795a;
  --s0: #2f8f83; --s1: #4b3f9e; --s2: #b8860b; --s3: #b8485c; --s4: #4a9cc9; --s5: #7d7f2a; --s6: #8a8d94;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131417; --card: #1c1e22; --ink: #ececea; --soft: #a3a6ae; --line: #31343a; --grid: #292c31;
    --fresh: #56b4e9; --replay: #f5a04a; --held-out: #ececea; --good: #4fd0a5;
    --s0: #5cc4b6; --s1: #9c91f0; --s2: #e3c15c; --s3: #e88a9a; --s4: #8fd0f0; --s5: #bcbe62; --s6: #8a8d94;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
}
main { max-width: 1180px; margin: 0 auto; padding: 36px 20px 64px; }
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -0.01em; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 19px; letter-spacing: -0.005em; margin: 44px 0 14px; }
h3 { font-size: 15px; margin: 0; }
.eyebrow { margin: 0 0 4px; color: var(--soft); font-size: 13px; }
.setting { margin: 6px 0 0; color: var(--soft); font-size: 14px; overflow-wrap: anywhere; }
.legend-note { margin: 14px 0 0; color: var(--soft); font-size: 13px; }
.tiles { display: grid; gap: 14px; margin-top: 22px; grid-template-columns: repeat(12, 1fr); }
.tile, .panel, details { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.tile { padding: 16px 18px; grid-column: span 4; min-width: 0; }
.tile .name { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 22px; font-weight: 650; letter-spacing: -0.01em; font-variant-numeric: tabular-nums; }
.tile.hero .value { font-size: 34px; line-height: 1.2; }
.tile small { font-size: 14px; font-weight: 400; color: var(--soft); letter-spacing: 0; }
.tile .note { color: var(--soft); font-size: 13px; }
.tile .value span { white-space: nowrap; }
.arrow { color: var(--soft); font-weight: 400; }
.rising { color: var(--good); }
.share { display: flex; gap: 2px; height: 8px; margin: 8px 0 6px; }
.share span { display: block; min-width: 2px; border-radius: 2px; }
.share .fresh { background: var(--fresh); }
.share .replay { background: var(--replay); }
.panels { display: grid; gap: 16px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); }
.panel { margin: 0; padding: 16px 16px 10px; min-width: 0; display: flex; flex-direction: column; }
.how { margin: 2px 0 10px; color: var(--soft); font-size: 13px; line-height: 1.45; }
.legend {
  display: flex; flex-wrap: wrap; gap: 2px 16px; list-style: none; margin: auto 0 4px; padding: 0; font-size: 13px;
}
.legend li { display: flex; align-items: center; gap: 6px; white-space: nowrap; }
.legend b { font-weight: 600; font-variant-numeric: tabular-nums; }
.legend .absent { color: var(--soft); }
.swatch { width: 24px; height: 12px; flex: none; overflow: visible; }
.swatch.square { width: 12px; }
.chart { display: block; flex: none; width: 100%; height: auto; overflow: visible; }
.chart .grid { stroke: var(--grid); }
.chart .floor { stroke: var(--line); }
.chart .reference { stroke: var(--soft); stroke-dasharray: 1 4; stroke-linecap: round; stroke-width: 1.5; }
.tick { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.end { text-anchor: end; }
.mid { text-anchor: middle; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.curve.dashed { stroke-width: 1.3; stroke-dasharray: 5 4; }
.curve.steps { stroke-width: 1.8; stroke-linecap: butt; }
.halo { fill: none; stroke: var(--card); stroke-width: 5; }
.mark, .bar { stroke: none; }
.hit { fill: transparent; }
.hit:hover { fill: var(--ink); fill-opacity: 0.07; }
.curve.fresh { stroke: var(--fresh); } .mark.fresh, .bar.fresh { fill: var(--fresh); }
.curve.replay { stroke: var(--replay); } .mark.replay, .bar.replay { fill: var(--replay); }
.curve.held-out { stroke: var(--held-out); } .mark.held-out { fill: var(--held-out); }
.curve.ink { stroke: var(--ink); }
.curve.s0 { stroke: var(--s0); } .mark.s0, .bar.s0 { fill: var(--s0); }
.curve.s1 { stroke: var(--s1); } .mark.s1, .bar.s1 { fill: var(--s1); }
.curve.s2 { stroke: var(--s2); } .mark.s2, .bar.s2 { fill: var(--s2); }
.curve.s3 { stroke: var(--s3); } .mark.s3, .bar.s3 { fill: var(--s3); }
.curve.s4 { stroke: var(--s4); } .mark.s4, .bar.s4 { fill: var(--s4); }
.curve.s5 { stroke: var(--s5); } .mark.s5, .bar.s5 { fill: var(--s5); }
.curve.s6 { stroke: var(--s6); } .mark.s6, .bar.s6 { fill: var(--s6); }
.missing {
  flex: 1; display: flex; flex-direction: column; align-items: center; justify-content: center; gap: 4px;
  min-height: 190px; margin: 0 0 6px; padding: 20px; text-align: center; color: var(--soft); font-size: 13px;
  border: 1.5px dashed var(--line); border-radius: 8px;
}
.missing strong { color: var(--ink); font-size: 14px; font-weight: 600; }
.missing svg { width: 72px; height: 30px; margin-bottom: 6px; }
.missing path { fill: none; stroke: var(--line); stroke-width: 2; stroke-dasharray: 4 5; stroke-linecap: round; }
details { margin-top: 44px; }
summary { cursor: pointer; padding: 14px 18px; font-weight: 600; }
pre {
  margin: 0; padding: 4px 18px 18px; overflow-x: auto; font: 12.5px/1.55 ui-monospace, "SF Mono", Menlo, Consolas,
  "DejaVu Sans Mono", monospace;
}
footer { margin-top: 24px; color: var(--soft); font-size: 13px; }
@media (max-width: 860px) {
  .tile { grid-column: span 6; }
  .tile.hero { grid-column: span 12; }
}
@media (max-width: 560px) {
  main { padding: 22px 12px 48px; }
  .tile { grid-column: span 12; }
  h1 { font-size: 23px; }
  .panel { padding: 14px 10px 8px; }
  .tile { padding: 13px 14px; }
  .tile .value { font-size: 19px; }
  .tile.hero .value { font-size: 27px; }
  .tick { font-size: 17px; }
  .tick.name { font-size: 15px; }
  .curve { stroke-width: 3; }
  .curve.dashed { stroke-width: 2; }
}
@media print { .panel, .tile { break-inside: avoid; } main { padding: 0; } }
"""
