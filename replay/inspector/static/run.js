// A run's page goes on while the run does: new points, tiles and rows come without a reload.

import { fit, update } from "./charts.js";
import { told } from "./scales.js";

const badge = document.getElementById("progress");
const address = `${location.pathname}.json`;
const every = 3000, mostRows = 12;
const charts = JSON.parse(document.getElementById("charts").textContent);
let stretch = null, looks = 0; // what is zoomed into, and how often that has changed
let closer = null; // charts by key, with the points of that stretch
let progress = JSON.parse(badge.dataset.progress);
let waiting = null;

function showProgress(reachable = true) {
  const { state, iteration, iterations, seconds_since: silent } = progress;
  const far = iterations ? `${iteration} of ${state === "finished" ? "at most " : ""}${iterations}` : String(iteration);
  const words = {
    live: `live, iteration ${far}`,
    finished: `finished after iteration ${far}`,
    stopped: `stopped ${ago(silent)} after iteration ${far}`,
    imported: "imported",
  };
  const text = reachable ? words[state] : "the inspector does not answer";
  // It is a status, which is read aloud whenever it is set.
  if (badge.textContent !== text) badge.textContent = text;
  badge.className = `badge ${!reachable ? "bad" : { live: "live good", finished: "good", stopped: "bad" }[state] ?? ""}`;
}

function ago(seconds) {
  if (seconds == null) return "";
  const [size, unit] = seconds < 90 ? [1, "s"] : seconds < 5400 ? [60, "min"] : seconds < 129600 ? [3600, "h"] : [86400, "days"];
  return `${Math.round(seconds / size)} ${unit} ago`;
}

async function ask() {
  waiting = null;
  if (document.hidden) return;
  const began = performance.now();
  let found;
  try {
    // The newest one is asked for again: its evaluation comes after its update. The page may be of a stretch only.
    const query = new URLSearchParams(location.search);
    query.set("after", Math.max(-1, progress.logged - 1));
    query.set("mark", progress.mark);
    const answer = await fetch(`${address}?${query}`);
    found = answer.ok ? await answer.json() : null;
  } catch {
    found = null;
  }
  if (found) take(found);
  showProgress(found !== null);
  next(performance.now() - began);
}

function next(took = 0) {
  // A stopped run may be resumed; a finished one is over. What takes long is asked less often.
  const often = Math.max(every, 10 * took);
  const pause = { live: often, stopped: 10 * often }[progress.state];
  if (pause && !document.hidden && waiting === null) waiting = setTimeout(ask, pause);
}

function take(found) {
  const before = progress;
  progress = found.progress;
  if (progress.logged < before.logged || (before.logged < 0 && progress.logged >= 0)) return location.reload();
  if (!found.groups.length) return;
  for (const panel of found.groups.flatMap((group) => group.panels)) {
    if (!merge(panel)) return location.reload();
    document.getElementById(`panel-${panel.key}`).querySelector(".how").textContent = panel.how;
  }
  if (stretch && stretch[1] > before.logged) look(stretch);
  else drawCharts();
  showTiles(found.tiles);
  showRows(found.iterations);
}

// New points replace those of their place. False: there are other curves now than when the page was made, or other
// points, each of more iterations.
function merge(panel) {
  const known = charts[panel.key];
  if (known?.merged !== panel.merged) return false;
  const pairs = panel.curves.map((curve) => [known.curves.find((each) => each.label === curve.label), curve]);
  if (panel.steps) pairs.push([known.steps, panel.steps]);
  for (const [old, curve] of pairs) {
    if (!old) return false;
    const first = curve.points[0]?.[0] ?? Infinity;
    curve.points = [...old.points.filter(([place]) => place < first), ...curve.points];
  }
  charts[panel.key] = panel;
  return true;
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
  const found = range && await pointsOf(range);
  if (mine !== looks) return;
  closer = found ? Object.fromEntries(found.groups.flatMap((group) => group.panels).map((panel) => [panel.key, within(panel)])) : null;
  drawCharts();
}

async function pointsOf([low, high]) {
  try {
    const answer = await fetch(`${address}?first=${Math.max(0, Math.floor(low))}&last=${Math.max(0, Math.ceil(high))}`);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null; // the coarse points stay, and say so
  }
}

// The run's own panel, for what it tells and how it colours hangs on all of the run; curves without a point keep theirs.
function within(panel) {
  const whole = charts[panel.key];
  const nearer = (curve, found) => found?.points.length ? { ...curve, points: found.points } : curve;
  const curves = whole.curves.map((curve) => nearer(curve, panel.curves.find((each) => each.label === curve.label)));
  return { ...whole, merged: panel.merged, curves, steps: whole.steps && nearer(whole.steps, panel.steps) };
}

document.addEventListener("zoom", ({ detail: { range } }) => {
  if (Object.values(charts)[0]?.merged > 1) look(range);
});

function element(name, className, text = "") {
  return Object.assign(document.createElement(name), { className, textContent: text });
}

function showTiles(tiles) {
  const shown = document.querySelectorAll("#tiles .tile");
  tiles.forEach((tile, index) => {
    const value = shown[index].querySelector(".value");
    value.replaceChildren(...tile.words.flatMap((word) => {
      const span = element("span", word.kind, word.text);
      if (word.unit) span.append(" ", element("small", "", word.unit));
      return [span, " "];
    }));
    shown[index].querySelector(".note").textContent = tile.note;
    const bars = shown[index].querySelectorAll(".share rect");
    if (!tile.streams || !bars.length) return;
    const share = 100 * tile.streams[0] / (tile.streams[0] + tile.streams[1]);
    bars[0].setAttribute("width", share);
    bars[1].setAttribute("x", share);
    bars[1].setAttribute("width", 100 - share);
  });
}

function showRows(rows) {
  const table = document.getElementById("iterations"), body = table.tBodies[0];
  for (const row of [...rows].reverse()) {
    const href = table.dataset.link.replace("{}", row.iteration);
    const line = element("tr", "new");
    line.dataset.href = href;
    line.dataset.at = row.iteration;
    line.insertCell().append(Object.assign(document.createElement("a"), { href, textContent: row.iteration }));
    const fixed = (value, places) => value == null ? "\u2013" : value.toFixed(places);
    const percent = (value) => value == null ? "\u2013" : `${fixed(100 * value, 1)}\u00a0%`;
    const texts = [
      told(row.fresh), told(row.replay), percent(row.success), percent(row.held_out), fixed(row.reward, 3),
      fixed(row.pg_loss_fresh, 4), fixed(row.pg_loss_replay, 4), percent(row.ess_replay),
      percent(row.clip_fraction_replay), fixed(row.staleness, 1), fixed(row.seconds, 1),
    ];
    for (const text of texts) line.insertCell().textContent = text;
    const known = body.querySelector(`[data-at="${row.iteration}"]`);
    if (known) line.className = known.className;
    body.querySelector("tr:not([data-at])")?.remove();
    const focused = known?.contains(document.activeElement);
    if (known) known.replaceWith(line);
    else body.prepend(line);
    if (focused) line.querySelector("a").focus({ preventScroll: true });
  }
  [...body.rows].slice(mostRows).forEach((row) => row.remove());
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(waiting);
  waiting = null;
  if (!document.hidden && progress.state !== "finished" && progress.state !== "imported") ask();
});
showProgress();
next();
