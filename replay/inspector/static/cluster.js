// The page of a cluster goes on while the run does: it asks for itself, and puts what came in the place of what stood.

const every = 3000;
const reached = document.getElementById("reached");
let waiting = null;

function busy() {
  // Whoever marks a text to copy it, or walks the bars by keys, is not disturbed.
  const now = document.getElementById("now");
  return now.contains(document.activeElement) || (String(getSelection()) && getSelection().containsNode(now, true));
}

async function ask() {
  waiting = null;
  if (document.hidden) return;
  const began = performance.now();
  if (!busy()) await look();
  // What takes long is asked less often.
  if (!("ended" in document.getElementById("now").dataset)) next(Math.max(every, 10 * (performance.now() - began)));
}

async function look() {
  let text = null;
  try {
    const answer = await fetch(location.href);
    text = answer.ok ? await answer.text() : null;
  } catch {
    text = null;
  }
  const found = text && new DOMParser().parseFromString(text, "text/html");
  const now = found && found.getElementById("now");
  reached.textContent = now ? found.getElementById("reached").textContent : "the inspector does not answer";
  reached.className = now ? found.getElementById("reached").className : "badge aside bad";
  if (!now || busy()) return;
  const waits = document.getElementById("waits"), newer = found.getElementById("waits");
  // It is a status, which is read aloud whenever it is set.
  if (waits.textContent !== newer.textContent) waits.textContent = newer.textContent;
  waits.dataset.who = newer.dataset.who;
  const scrolled = [...document.querySelectorAll("#now .scroll")].map((each) => each.scrollLeft);
  document.getElementById("now").replaceWith(document.adoptNode(now));
  document.querySelectorAll("#now .scroll").forEach((each, at) => { each.scrollLeft = scrolled[at] ?? 0; });
}

function next(pause) {
  if (!document.hidden && waiting === null) waiting = setTimeout(ask, pause);
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(waiting);
  waiting = null;
  if (!document.hidden) ask();
});
next(every);
