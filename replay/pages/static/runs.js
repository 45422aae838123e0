// All runs: their curves over what the reader chose, smoothed, and as one where runs share a look; and news of live runs.
//
// The element `reading` holds what each run spent in its iterations, by its name, and how the curves are to be read.

import { draw, fit, update } from "./charts.js";

const every = 5000;
const valuesOf = (page, id) => JSON.parse(page.getElementById(id)?.textContent ?? "{}");

// How much a run had spent after each iteration, ascending.
function totals(spent) {
  const amounts = new Map();
  for (const [iteration, amount] of spent) amounts.set(iteration, (amounts.get(iteration) ?? 0) + amount);
  let sum = 0;
  return [...amounts].sort(([one], [other]) => one - other).map(([iteration, amount]) => [iteration, sum += amount]);
}

// Each point becomes the mean of so many newest ones, which has no interval.
function smoothed(curve, count) {
  if (count < 2) return curve;
  const mean = (values) => values.reduce((sum, [, value]) => sum + value, 0) / values.length;
  const points = curve.points.map(([at], index) => [at, mean(curve.points.slice(Math.max(0, index + 1 - count), index + 1))]);
  return { ...curve, points, band: [] };
}

// Several runs become the mean of those that have points, with their range, as far as all of these have points. They are
// seeds of one setting, or were marked.
function asOne(curves, marked) {
  const known = curves.map((curve) => new Map(curve.points)).filter((points) => points.size);
  if (curves.length === 1 || !known.length) return curves[0];
  const rest = curves.length - 1;
  const shared = [...known[0].keys()].filter((at) => known.every((points) => points.has(at)));
  const values = shared.map((at) => known.map((points) => points.get(at)));
  return {
    ...curves[0],
    label: marked.includes(curves[0].label)
      ? `${curves[0].label} and ${rest} other${rest > 1 ? "s" : ""}` : `${curves.length} seeds of ${curves[0].label}`,
    points: shared.map((at, index) => [at, values[index].reduce((sum, value) => sum + value) / known.length]),
    band: shared.map((at, index) => [at, Math.min(...values[index]), Math.max(...values[index])]),
    members: curves.map((curve) => curve.label),
  };
}

// A curve over what its runs had spent, on average, at the end of each point.
function moved(curve, reading, merged) {
  if (!Object.values(reading.spent).some(Boolean)) return curve;
  const runs = (curve.members ?? [curve.label]).map((name) => totals(reading.spent[name] ?? []));
  if (!runs.every((run) => run.length)) return { ...curve, points: [], band: [], absent: `Its ${reading.over} are not known.` };
  const place = (at) => runs
    .map((run) => run.findLast(([iteration]) => iteration <= (at < 1 ? at : at + merged - 1))?.[1] ?? 0)
    .reduce((sum, value) => sum + value) / runs.length;
  const move = ([at, ...values]) => [place(at), ...values];
  return { ...curve, points: curve.points.map(move), band: (curve.band ?? []).map(move) };
}

function read(chart, reading) {
  const looks = Map.groupBy(chart.curves, (curve) => `${curve.role} ${curve.dashed}`);
  const count = /held-out|Metric eval\//.test(chart.title) ? 1 : reading.smooth;
  const curves = [...looks.values()].map((each) => asOne(each.map((curve) => smoothed(curve, count)), reading.as_one));
  const shaded = curves.some((curve) => curve.members) ? "smallest to largest of several runs; of one run, the 95 % interval" : undefined;
  return { ...chart, over: reading.over, shaded, curves: curves.map((curve) => moved(curve, reading, chart.merged)) };
}

function chartsOf(page) {
  const reading = valuesOf(page, "reading");
  return Object.fromEntries(Object.entries(valuesOf(page, "charts")).map(([key, chart]) => [key, read(chart, reading)]));
}

draw(chartsOf(document));

const isLive = () => document.querySelector('[data-state="live"]');
let waiting = null;

async function ask() {
  waiting = null;
  if (document.hidden) return;
  const began = performance.now(), answer = await fetch(location.href).catch(() => null);
  if (answer?.ok) take(new DOMParser().parseFromString(await answer.text(), "text/html"));
  next(Math.max(every, 10 * (performance.now() - began)));
}

// Marks that the reader has set and not yet sent stay: only what is said of the runs is replaced.
function take(page) {
  const found = chartsOf(page), rows = [...document.querySelectorAll("[data-run]")], now = [...page.querySelectorAll("[data-run]")];
  const keys = [...document.querySelectorAll(".chart[data-key]")].map((element) => element.dataset.key);
  const names = (each) => each.map((row) => row.dataset.run).join();
  if (keys.join() !== Object.keys(found).join() || names(rows) !== names(now)) return location.reload();
  rows.forEach((row, index) => {
    const cells = [...now[index].querySelectorAll("[data-news]")];
    row.querySelectorAll("[data-news]").forEach((cell, at) => cell.replaceWith(document.adoptNode(cells[at])));
    row.dataset.state = now[index].dataset.state;
  });
  for (const [key, chart] of Object.entries(found)) update(document.querySelector(`#panel-${key} .chart`), chart);
  fit();
}

function next(pause) {
  if (isLive() && !document.hidden && waiting === null) waiting = setTimeout(ask, pause);
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(waiting);
  waiting = null;
  if (isLive()) ask();
});
next(every);
