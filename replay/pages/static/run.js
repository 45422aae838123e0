// A run's page goes on while the run does: it asks for itself, and takes over what has changed without a reload.

import { fit, update } from "./charts.js";

const every = 3000;
const chartsOf = (page) => JSON.parse(page.getElementById("charts").textContent);
let charts = chartsOf(document);
let waiting = null;

const progress = () => document.getElementById("progress");

// The page as it is now; null: nothing has changed since `mark`.
async function fetched(mark) {
  const answer = await fetch(`${location.pathname}?${new URLSearchParams({ mark })}`);
  if (!answer.ok) throw new Error(answer.status);
  return answer.status === 204 ? null : new DOMParser().parseFromString(await answer.text(), "text/html");
}

async function ask() {
  waiting = null;
  if (document.hidden) return;
  const began = performance.now();
  try {
    const now = await fetched(progress().dataset.mark);
    if (now) take(now);
  } catch {
    Object.assign(progress(), { textContent: "the inspector does not answer", className: "badge bad" }).dataset.mark = "";
  }
  // What takes long is asked less often; a stopped run may be resumed, and a finished one is over.
  const often = Math.max(every, 10 * (performance.now() - began));
  next({ live: often, stopped: 10 * often }[progress().dataset.state]);
}

function next(pause) {
  if (pause && !document.hidden && waiting === null) waiting = setTimeout(ask, pause);
}

function take(now) {
  const found = chartsOf(now);
  if (Object.keys(found).join() !== Object.keys(charts).join() || now.getElementById("merged")?.textContent !== document.getElementById("merged")?.textContent) {
    return location.reload();
  }
  charts = found;
  const focused = document.activeElement?.closest("#iterations")?.contains(document.activeElement) && document.activeElement.href;
  for (const id of ["progress", "tiles", "iterations"]) document.getElementById(id).replaceWith(document.adoptNode(now.getElementById(id)));
  if (focused) [...document.querySelectorAll("#iterations a")].find((link) => link.href === focused)?.focus({ preventScroll: true });
  for (const [key, chart] of Object.entries(charts)) {
    document.querySelector(`#panel-${key} .how`).textContent = chart.how;
    update(document.querySelector(`#panel-${key} .chart`), chart);
  }
  fit();
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(waiting);
  waiting = null;
  if (!document.hidden && ["live", "stopped"].includes(progress().dataset.state)) ask();
});
next({ live: every, stopped: 10 * every }[progress().dataset.state]);
