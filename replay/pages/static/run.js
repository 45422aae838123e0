// A run's page goes on while the run does: it asks for itself, and takes over what has changed without a reload.

import { fit, update } from "./charts.js";

const every = 3000;
const chartsOf = (page) => JSON.parse(page.getElementById("charts").textContent);
let charts = chartsOf(document);
let stretch = null, looks = 0; // what is zoomed into, and how often that has changed
let closer = null; // charts by key, with the points of that stretch
let waiting = null;

const progress = () => document.getElementById("progress");

// The page as it is now; null: nothing has changed since `mark`.
async function fetched(query) {
  const answer = await fetch(`${location.pathname}?${new URLSearchParams(query)}`);
  if (!answer.ok) throw new Error(answer.status);
  return answer.status === 204 ? null : new DOMParser().parseFromString(await answer.text(), "text/html");
}

async function ask() {
  waiting = null;
  if (document.hidden) return;
  const began = performance.now();
  try {
    const now = await fetched({ mark: progress().dataset.mark });
    if (now) take(now);
  } catch {
    Object.assign(progress(), { textContent: "the inspector does not answer", className: "badge bad" }).dataset.mark = "";
  }
  // What takes long is asked less often; a stopped run may be resumed, and a finished one is over.
  const often = Math.max(every, 10 * (performance.now() - began));
  next({ live: often, stopped: 10 * often, idle: 10 * often }[progress().dataset.state]);
}

function next(pause) {
  if (pause && !document.hidden && waiting === null) waiting = setTimeout(ask, pause);
}

function take(now) {
  const found = chartsOf(now);
  if (Object.keys(found).join() !== Object.keys(charts).join() || !now.getElementById("merged") !== !document.getElementById("merged")) {
    return location.reload();
  }
  charts = found;
  const focused = document.activeElement?.closest("#iterations")?.contains(document.activeElement) && document.activeElement.href;
  for (const id of ["progress", "tiles", "iterations"]) document.getElementById(id).replaceWith(document.adoptNode(now.getElementById(id)));
  if (focused) [...document.querySelectorAll("#iterations a")].find((link) => link.href === focused)?.focus({ preventScroll: true });
  for (const [key, chart] of Object.entries(charts)) document.querySelector(`#panel-${key} .how`).textContent = chart.how;
  if (stretch) look(stretch);
  else drawCharts();
}

function drawCharts() {
  const shown = closer ?? charts;
  for (const [key, chart] of Object.entries(shown)) update(document.querySelector(`#panel-${key} .chart`), chart);
  fit();
  const note = document.querySelector("#merged b"), merged = Object.values(shown)[0].merged;
  if (note) note.textContent = merged > 1 ? note.dataset.several.replace("{}", merged) : "Each point is an iteration.";
}

// Points of fewer iterations for the stretch that was zoomed into, where those of the whole run stand for several.
async function look(range) {
  const mine = looks += 1;
  stretch = range;
  const asked = range && { first: Math.max(0, Math.floor(range[0])), last: Math.max(0, Math.ceil(range[1])) };
  const found = asked && await fetched(asked).catch(() => null); // the coarse points stay, and say so
  if (mine !== looks) return;
  closer = found ? Object.fromEntries(Object.entries(chartsOf(found)).map(([key, chart]) => [key, within(chart, charts[key])])) : null;
  drawCharts();
}

// Curves without a point in the stretch keep those of the whole run.
function within(chart, whole) {
  const nearer = (curve) => {
    const found = [...chart.curves, chart.steps].find((each) => each?.label === curve.label);
    return found?.points.length ? { ...curve, points: found.points } : curve;
  };
  return { ...whole, merged: chart.merged, curves: whole.curves.map(nearer), steps: whole.steps && nearer(whole.steps) };
}

document.addEventListener("zoom", ({ detail: { range } }) => {
  if (Object.values(charts)[0]?.merged > 1) look(range);
});
document.addEventListener("visibilitychange", () => {
  clearTimeout(waiting);
  waiting = null;
  if (!document.hidden && ["live", "stopped", "idle"].includes(progress().dataset.state)) ask();
});
next({ live: every, stopped: 10 * every, idle: 10 * every }[progress().dataset.state]);
