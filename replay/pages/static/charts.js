// Charts of a page: uPlot with our colours, markers, legend and crosshair.
//
//   <div class="chart" data-key="success" data-link="/runs/RUN/iterations/{}"></div>
//
// `data-key` names one of the charts in the element `charts`, which holds JSON. A chart is what
// replay.pages.charts makes of a panel. `data-link` is where a click leads, {} being the place clicked on.
// `data-marks` holds places on the horizontal axis with their names, as [[3, "sampled"]].
// Charts whose horizontal axes count the same share their crosshair and their zoom. Pages that get new values call
// `update`; "zoom" tells them of a stretch that is looked at, or of none. A page with the element `reading` changes its
// charts and calls `draw` itself (see runs.js): `over` is what their horizontal axis counts, `shaded` what their bands mean.
// A curve that `isThin` is one of those that a curve that `isOne` stands for: the table has it, the legend has not.

/* global uPlot */

import { isLogarithmic, logRange, logSplits, range, tickTexts, formatted, valueAt, visibleText } from "./scales.js";

const drawn = new Map(); // element -> Drawn
const square = "square";
const fewMarked = 45;
const wholeSteps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6];
const svgSpace = "http://www.w3.org/2000/svg";

let colours = {};
function colour(name) {
  colours[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return colours[name];
}

function faint(curve, percent) {
  return `color-mix(in srgb, ${colour(curve.role)} ${percent}%, transparent)`;
}

// From the chart's curves to uPlot's columns: one of places, one of values for each curve, null where it has none.

function curvesOf(chart) {
  return chart.steps ? [...chart.curves, chart.steps] : chart.curves;
}

function columns(chart) {
  const places = [...new Set(curvesOf(chart).flatMap((curve) => curve.points.map((point) => point[0])))].sort((a, b) => a - b);
  const at = new Map(places.map((place, index) => [place, index]));
  const values = curvesOf(chart).map((curve) => {
    const column = Array(places.length).fill(null);
    for (const [place, value] of curve.points) column[at.get(place)] = value;
    return column;
  });
  return { places, values };
}

// The lower and the upper end of each curve's band, which are columns of their own behind all curves.
function bandsOf(chart) {
  return chart.kind === "bars" ? [] : chart.curves.flatMap((curve, index) => curve.band?.length ? [{ curve, index }] : []);
}

function bandColumns(chart, places) {
  return bandsOf(chart).flatMap(({ curve }) => {
    const ends = new Map(curve.band.map(([at, ...both]) => [at, both]));
    return [0, 1].map((end) => places.map((place) => ends.get(place)?.[end] ?? null));
  });
}

function stacked(chart, values) {
  // Bars are drawn from the floor, the tallest first, so that each layer shows above the one below it.
  const sums = [];
  let below = Array(values[0]?.length ?? 0).fill(0);
  for (const column of values.slice(0, chart.curves.length)) {
    below = below.map((sum, index) => sum + Math.max(column[index] ?? 0, 0));
    sums.push(below);
  }
  return [...sums.reverse(), ...values.slice(chart.curves.length)];
}

// Drawing

// Round or square, so that streams differ by more than their colour.
function marks(shape) {
  return (u, index, first, last, chosen) => {
    const path = new Path2D(), radius = (shape === square ? 2.7 : 2.9) * devicePixelRatio;
    const one = (at) => {
      const value = u.data[index][at];
      if (value == null) return;
      const x = u.valToPos(u.data[0][at], "x", true), y = u.valToPos(value, "y", true);
      if (shape === square) path.rect(x - radius, y - radius, 2 * radius, 2 * radius);
      else { path.moveTo(x + radius, y); path.arc(x, y, radius, 0, 2 * Math.PI); }
    };
    if (chosen) chosen.forEach(one);
    else for (let at = first; at <= last; at++) one(at);
    return { fill: path, stroke: null, flags: 3 };
  };
}

function series(chart) {
  const lines = (curve) => ({
    label: curve.label,
    stroke: () => curve.isThin ? faint(curve, 55) : colour(curve.role),
    width: curve.isThin ? 1 : curve.dashed ? 1.4 : 2,
    dash: curve.dashed ? [5, 4] : undefined,
    spanGaps: true,
    points: {
      show: (u, index, first, last) => {
        if (curve.isThin) return curve.points.length === 1;
        return (!curve.dashed || last === first) && last - first <= fewMarked;
      },
      paths: marks(curve.marker), fill: () => colour(curve.role), width: 0,
    },
  });
  const edge = { width: 0, spanGaps: true, points: { show: false } };
  if (chart.kind !== "bars") return [...chart.curves.map(lines), ...bandsOf(chart).flatMap(() => [edge, edge])];
  const bars = [...chart.curves].reverse().map((curve) => ({
    label: curve.label, fill: () => colour(curve.role), width: 0,
    points: { show: false }, paths: uPlot.paths.bars({ size: [0.82, 56], gap: 0 }),
  }));
  // The stepped line is drawn by hand, over the bars: see `overlay`.
  if (chart.steps) bars.push({ label: chart.steps.label, points: { show: false }, paths: () => null });
  return bars;
}

function bands(chart) {
  return bandsOf(chart).map(({ curve }, index) => {
    const low = 1 + chart.curves.length + 2 * index;
    return { series: [low + 1, low], fill: () => faint(curve, 16) };
  });
}

function underlay(chart, marks) {
  return (u) => {
    for (const [place] of marks) {
      const x = u.valToPos(place, "x", true);
      stroke(u, colour("soft"), 1, [3, 3], (path) => { path.moveTo(x, u.bbox.top); path.lineTo(x, u.bbox.top + u.bbox.height); });
    }
    if (chart.axis.reference == null) return;
    const y = u.valToPos(chart.axis.reference, "y", true);
    if (y < u.bbox.top || y > u.bbox.top + u.bbox.height) return;
    stroke(u, colour("soft"), 1.5, [1, 4], (path) => {
      path.moveTo(u.bbox.left, y);
      path.lineTo(u.bbox.left + u.bbox.width, y);
    });
  };
}

function overlay(chart) {
  return (u) => {
    if (!chart.steps) return;
    const trace = (path) => {
      let before = null;
      for (const [place, value] of chart.steps.points) {
        const y = u.valToPos(value, "y", true);
        const [left, right] = [place - 0.5, place + 0.5].map((x) => u.valToPos(x, "x", true));
        if (before === null) path.moveTo(left, y);
        else path.lineTo(left, y);
        path.lineTo(right, y);
        before = y;
      }
    };
    // The halo keeps the line apart from bars of any colour.
    stroke(u, colour("card"), 5, [], trace);
    stroke(u, colour(chart.steps.role), 1.8, [], trace);
  };
}

function stroke(u, style, width, dash, trace) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.beginPath();
  ctx.strokeStyle = style;
  ctx.lineWidth = width * devicePixelRatio;
  ctx.setLineDash(dash.map((part) => part * devicePixelRatio));
  ctx.lineCap = dash.length ? "round" : "butt";
  trace(ctx);
  ctx.stroke();
  ctx.restore();
}

class Drawn {
  constructor(element) {
    this.element = element;
    this.marks = JSON.parse(element.dataset.marks ?? "[]");
    this.canvas = document.createElement("div");
    this.canvas.className = "chart-canvas";
    this.legend = document.createElement("ul");
    this.legend.className = "legend";
    this.values = document.createElement("details");
    this.values.className = "chart-values";
    this.values.append(Object.assign(document.createElement("summary"), { textContent: "values" }));
    this.values.addEventListener("toggle", () => this.fillTable());
    element.replaceChildren(this.legend, this.canvas, this.values);
    this.canvas.setAttribute("role", "img");
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  show(chart) {
    this.chart = chart;
    this.canvas.setAttribute("aria-label", visibleText(chart.summary ?? ""));
    const { places, values } = columns(chart);
    this.places = places;
    this.raw = values;
    const shape = JSON.stringify([chart.kind, isLogarithmic(chart), curvesOf(chart).map((c) => [c.label, c.role, c.points.length > 0, c.band?.length > 0])]);
    this.element.classList.toggle("chart-empty", !places.length);
    if (!places.length) return this.showMissing(chart);
    const data = [places, ...(chart.kind === "bars" ? stacked(chart, values) : [...values, ...bandColumns(chart, places)])];
    if (this.plot && shape === this.shape) {
      const zoomed = this.zoomed();
      this.plot.setData(data, false);
      if (!zoomed) this.reset();
      else this.plot.redraw();
    } else {
      this.plot?.destroy();
      this.canvas.replaceChildren();
      this.shape = shape;
      this.plot = new uPlot(this.options(), data, this.canvas);
      this.plot.over.addEventListener("click", (event) => this.clicked(event));
      this.plot.over.addEventListener("dblclick", () => this.unzoomed());
    }
    this.tell(this.plot.cursor.idx);
    this.fillTable();
  }

  showMissing(chart) {
    this.plot?.destroy();
    this.plot = null;
    const why = chart.curves[0]?.absent ?? "Nothing to show.";
    const strong = Object.assign(document.createElement("strong"), { textContent: "Not measured" });
    const text = Object.assign(document.createElement("span"), { textContent: why });
    this.canvas.replaceChildren(strong, text);
    this.legend.replaceChildren();
  }

  options() {
    // Read again on each drawing: update() replaces the chart, the plot stays.
    const self = this, axis = this.chart.axis, log = isLogarithmic(this.chart);
    const font = "12px system-ui, sans-serif";
    const ink = { stroke: () => colour("soft"), font, labelFont: font, ticks: { show: false } };
    return {
      ...this.size(),
      padding: [8, 18, 0, 0],
      legend: { show: false },
      series: [{}, ...series(this.chart)],
      bands: bands(this.chart),
      scales: {
        x: { time: false, range: () => self.zoom ?? self.extent() },
        y: log
          ? { distr: 3, range: (u, low, high) => logRange(Math.min(low, axis.reference ?? low), Math.max(high, axis.reference ?? high)) }
          : { range: (u, low, high) => low == null ? [0, 1] : range(self.chart, low, high) },
      },
      axes: [
        {
          ...ink, size: 22, gap: 4, space: 46, grid: { show: false }, label: self.over(), labelSize: 16, labelGap: 0,
          ...(self.overIterations() ? { incrs: wholeSteps } : {}),
          values: (u, splits) => self.overIterations() ? splits.map((split) => Number.isInteger(split) ? self.place(split) : "") : tickTexts(splits),
        },
        {
          ...ink, gap: 6, space: 34, grid: { stroke: () => colour("grid"), width: 1 },
          size: (u, texts) => 12 + Math.max(22, ...(texts ?? []).map((text) => 6.6 * (text?.length ?? 0))),
          values: (u, splits) => tickTexts(splits, axis.percent, log),
          ...(log ? { splits: (u, index, low, high) => logSplits(low, high) } : {}),
        },
      ],
      cursor: {
        sync: { key: "iterations", scales: ["x", null] },
        drag: { x: true, y: false, dist: 6 },
        points: { show: this.chart.kind !== "bars", size: 8, width: 2, fill: () => colour("card") },
        y: false,
      },
      hooks: {
        drawAxes: [(u) => underlay(self.chart, self.marks)(u)],
        draw: [(u) => overlay(self.chart)(u)],
        setCursor: [(u) => self.tell(u.cursor.idx)],
        setSelect: [(u) => { if (u.select.width > 0) self.zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); }],
      },
    };
  }

  size() {
    return { width: Math.max(120, this.canvas.clientWidth), height: Number(this.element.dataset.height) };
  }

  resize() {
    if (this.plot && this.canvas.clientWidth) this.plot.setSize(this.size());
  }

  over() {
    return this.chart.over ?? "iterations";
  }

  overIterations() {
    return this.over() === "iterations";
  }

  place(at) {
    return at.toLocaleString("en-US", { maximumFractionDigits: at < 1000 ? 2 : 0 });
  }

  // A place with the name of what it counts.
  named(text) {
    return this.overIterations() ? `iteration ${text}` : `${text} ${this.over()}`;
  }

  // All places that a point stands for; what came before training is a point of its own.
  placesOf(at) {
    const merged = this.overIterations() ? this.chart.merged ?? 1 : 1;
    return merged > 1 && at > 0 ? `${this.place(at)}\u2013${this.place(at + merged - 1)}` : this.place(at);
  }

  // All charts of a page have the same ends, so that they can be read one above the other.
  extent() {
    let low = Infinity, high = -Infinity;
    for (const each of drawn.values()) {
      if (!each.places.length) continue;
      const ends = [each.places[0], each.places.at(-1), ...each.marks.map(([place]) => place)];
      low = Math.min(low, ...ends);
      high = Math.max(high, ...ends);
    }
    const room = Math.max([...drawn.values()].every((each) => each.overIterations()) ? 0.5 : 1e-3, 0.015 * (high - low));
    return [low - room, high + room];
  }

  zoomed() {
    return this.zoom != null;
  }

  zoomTo(range) {
    this.zoom = range;
    tellZoom(range);
  }

  reset() {
    this.zoom = null;
    const [min, max] = this.extent();
    this.plot.setScale("x", { min, max });
  }

  clicked(event) {
    const at = this.plot.cursor.idx;
    // Where there is no mouse a tap shows the values, and the name of the place above them is the link.
    if (event.pointerType === "touch" || at == null) return;
    const link = this.link(this.places[at]);
    clearTimeout(this.leaving);
    // A second click within this time asks for the whole range instead.
    if (link) this.leaving = setTimeout(() => { location.href = link; }, 250);
  }

  unzoomed() {
    clearTimeout(this.leaving);
    for (const each of drawn.values()) if (each.plot) each.reset();
    tellZoom(null);
  }

  link(place) {
    return this.element.dataset.link && !(place < this.element.dataset.linkFrom)
      ? this.element.dataset.link.replace("{}", encodeURIComponent(place)) : null;
  }

  tell(at) {
    // The crosshair may still stand on a point that other values have not.
    const chart = this.chart, last = !(at in this.places);
    const items = curvesOf(chart).flatMap((curve, index) => {
      if (curve.isThin) return [];
      const item = document.createElement("li");
      if (!curve.points.length) {
        item.className = "absent";
        item.textContent = `${visibleText(curve.label)}: ${curve.isOne ? curve.absent : "not measured"}`;
        item.title = curve.absent ?? "";
        return item;
      }
      const number = Object.assign(document.createElement("b"), { textContent: this.text(curve, index, last ? null : at) });
      item.append(swatch(curve, chart), `${visibleText(curve.label)} `, number);
      return item;
    });
    const where = document.createElement("li");
    where.className = "where";
    if (!last) {
      const name = this.named(this.placesOf(this.places[at])), link = this.link(this.places[at]);
      where.append(link ? Object.assign(document.createElement("a"), { href: link, textContent: name }) : name);
    } else where.textContent = chart.axis.unit;
    const notes = this.marks.map(([place, name]) => `${name}: ${this.named(this.place(place))}`);
    if (bandsOf(chart).length) notes.push(`shaded: ${chart.shaded ?? "95 % interval of one iteration or evaluation; attempts at one task count as one"}`);
    const noted = notes.map((textContent) => Object.assign(document.createElement("li"), { className: "absent", textContent }));
    this.legend.replaceChildren(where, ...items, ...noted);
  }

  // A curve's value at a place, or its newest; curves over other amounts have places of their own, so their lines count.
  // Curves of compared runs end at different places, so the newest value says where it is.
  text(curve, index, at) {
    const points = curve.points, { percent } = this.chart.axis;
    const point = at === null ? points.at(-1)
      : [this.places[at], this.overIterations() ? this.raw[index][at] : valueAt(points, this.places[at])];
    const ends = curve.band?.find(([place]) => place === point?.[0]);
    const value = formatted(point?.[1], percent);
    const interval = ends && ends[1] < ends[2] ? ` (${formatted(ends[1], percent)} to ${formatted(ends[2], percent)})` : "";
    const where = at === null && (curve.isOne || !this.overIterations()) ? ` at ${this.named(this.placesOf(point[0]))}` : "";
    return `${value}${interval}${where}`;
  }

  fillTable() {
    if (!this.values.open) return;
    const curves = curvesOf(this.chart), table = document.createElement("table");
    table.createTHead().insertRow().append(...[this.overIterations() ? "iteration" : this.over(), ...curves.map((curve) => visibleText(curve.label))].map(heading));
    const body = table.createTBody();
    for (let at = this.places.length - 1; at >= 0; at--) {
      const row = body.insertRow();
      row.insertCell().textContent = this.placesOf(this.places[at]);
      curves.forEach((curve, index) => { row.insertCell().textContent = this.text(curve, index, at); });
    }
    const box = document.createElement("div");
    box.className = "chart-table";
    box.tabIndex = 0;
    box.append(table);
    this.values.querySelector(".chart-table")?.remove();
    this.values.append(box);
  }
}

// Pages that have finer points for a stretch listen for it; all charts zoom at once, which is announced once.
let telling = null;
function tellZoom(range) {
  clearTimeout(telling);
  telling = setTimeout(() => document.dispatchEvent(new CustomEvent("zoom", { detail: { range } })), 50);
}

function heading(text) {
  return Object.assign(document.createElement("th"), { textContent: text });
}

function swatch(curve, chart) {
  const isBar = chart.kind === "bars" && curve !== chart.steps;
  const svg = document.createElementNS(svgSpace, "svg");
  svg.setAttribute("class", isBar ? "swatch filled" : "swatch");
  svg.setAttribute("viewBox", isBar ? "0 0 12 12" : "0 0 24 12");
  svg.setAttribute("aria-hidden", "true");
  svg.style.color = `var(--${curve.role})`;
  const add = (name, attributes) => {
    const shape = document.createElementNS(svgSpace, name);
    for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
    svg.append(shape);
  };
  if (isBar) {
    add("rect", { width: 12, height: 12, rx: 2, fill: "currentColor" });
    return svg;
  }
  const dashes = curve.dashed ? { "stroke-dasharray": "5 4", "stroke-width": 1.4 } : { "stroke-width": 2 };
  add("path", { d: "M1 6H23", stroke: "currentColor", ...dashes });
  if (!curve.dashed && curve !== chart.steps) {
    if (curve.marker === square) add("rect", { x: 9.4, y: 3.4, width: 5.2, height: 5.2, fill: "currentColor" });
    else add("circle", { cx: 12, cy: 6, r: 2.9, fill: "currentColor" });
  }
  return svg;
}

// What pages call

export function update(element, chart) {
  if (!drawn.has(element)) drawn.set(element, new Drawn(element));
  drawn.get(element).show(chart);
}

// Numbers are painted first: nobody waits for curves to read them.
export function draw(charts) {
  if (typeof uPlot !== "undefined") requestAnimationFrame(() => setTimeout(drawAll, 0, charts));
}

// One at a time, so that keys and clicks are answered in between.
async function drawAll(charts) {
  for (const element of document.querySelectorAll(".chart[data-key]")) {
    if (!drawn.has(element)) update(element, charts[element.dataset.key]);
    await new Promise((resolve) => setTimeout(resolve));
  }
  fit();
}

// Charts drawn before the last one did not know how far it reaches.
export function fit() {
  for (const each of drawn.values()) if (each.places.length && !each.zoomed()) each.reset();
}

function recolour() {
  colours = {};
  for (const each of drawn.values()) each.plot?.redraw(false, true);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);

// Paper is white, and has its own sizes: curves are drawn anew in the colours and with the text sizes of the page on it.
// Three rows of charts fit on a page of A4.
const paper = { width: 315, height: 165 };
function printing(isOnPaper) {
  document.documentElement.classList.toggle("on-paper", isOnPaper);
  for (const each of drawn.values()) each.plot?.setSize(isOnPaper ? paper : each.size());
  recolour();
}

addEventListener("beforeprint", () => printing(true));
addEventListener("afterprint", () => printing(false));
if (!document.getElementById("reading")) draw(JSON.parse(document.getElementById("charts")?.textContent ?? "{}"));
