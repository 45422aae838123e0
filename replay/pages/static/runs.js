// All runs: their curves over what the reader chose, smoothed, and as one where runs share a look; and news of live runs.
//
// The element `reading` holds what each run spent in its iterations, by its name, and how the curves are to be read.

import { draw, fit, update } from "./charts.js";
import { valueAt } from "./scales.js";

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

// A curve over what its run had spent at the end of each point.
function moved(curve, reading, merged) {
  if (!Object.values(reading.spent).some(Boolean)) return curve;
  const run = totals(reading.spent[curve.label] ?? []);
  if (!run.length) return { ...curve, points: [], band: [], absent: `Its ${reading.over} are not known.` };
  const place = (at) => run.findLast(([iteration]) => iteration <= (at < 1 ? at : at + merged - 1))?.[1] ?? 0;
  const move = ([at, ...values]) => [place(at), ...values];
  return { ...curve, points: curve.points.map(move), band: (curve.band ?? []).map(move) };
}

// Where several curves are compared: in iterations that all have; over other amounts wherever one has a point, as far
// as all go.
function sharedPlaces(curves, over) {
  const places = curves.map((curve) => curve.points.map(([place]) => place));
  if (over === "iterations") return places.reduce((shared, other) => shared.filter((place) => other.includes(place)));
  const first = Math.max(...places.map((each) => each[0])), last = Math.min(...places.map((each) => each.at(-1)));
  return [...new Set(places.flat())].filter((place) => place >= first && place <= last).sort((one, other) => one - other);
}

// Several runs become the mean of those that have points, with their range, and a thin line for each. They are seeds of
// one setting, or were marked.
function asOne(curves, reading) {
  const known = curves.filter((curve) => curve.points.length);
  if (known.length < 2) return curves;
  const [{ label }] = known, others = known.length - 1;
  const count = known.length < curves.length ? `${known.length} of ${curves.length}` : known.length;
  const values = sharedPlaces(known, reading.over).map((place) => [place, known.map((curve) => valueAt(curve.points, place))]);
  const one = {
    ...known[0],
    label: reading.as_one.includes(label) ? `${label} and ${others} other${others > 1 ? "s" : ""}` : `${count} seeds of ${label}`,
    points: values.map(([place, each]) => [place, each.reduce((sum, value) => sum + value) / each.length]),
    band: values.map(([place, each]) => [place, Math.min(...each), Math.max(...each)]),
    absent: `its runs have no ${reading.over} in common`,
    isOne: true,
  };
  const apart = known.map((curve) => ({ ...curve, band: [], isThin: true }));
  return [one, ...apart, ...curves.filter((curve) => !curve.points.length)];
}

function read(chart, reading) {
  const count = /held-out|Metric eval\//.test(chart.title) ? 1 : reading.smooth;
  const runs = chart.curves.map((curve) => moved(smoothed(curve, count), reading, chart.merged));
  const curves = [...Map.groupBy(runs, (curve) => `${curve.role} ${curve.dashed}`).values()].flatMap((each) => asOne(each, reading));
  const shaded = curves.some((curve) => curve.isOne) ? "smallest to largest of several runs, each a thin line; of one run, the 95 % interval" : undefined;
  return { ...chart, over: reading.over, shaded, curves };
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
