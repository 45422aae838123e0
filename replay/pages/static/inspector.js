// Keys, and what every page does alike. Pages mark their parts with data attributes:
//   data-search-on   a link to more rows of a list, which are fetched without a click
//   data-rows        a table body whose rows j and k walk; data-href on a row is where Enter leads
//   data-key="n"     a link or button that a key presses
//   data-search      the field that / goes to
//   data-copy="#id"  a button that copies an element's text

const rowClass = "at";
let awaiting = null;

function rows() {
  return [...document.querySelectorAll("[data-rows] > [data-href]")];
}

function walk(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.classList.contains(rowClass));
  const next = all[at < 0 ? (step > 0 ? 0 : all.length - 1) : Math.max(0, Math.min(all.length - 1, at + step))];
  all.forEach((row) => row.classList.toggle(rowClass, row === next));
  const link = next.querySelector("a");
  (link ?? next).focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

function press(key) {
  const target = [...document.querySelectorAll(`[data-key="${CSS.escape(key)}"]`)].find((each) => !each.hasAttribute("disabled"));
  if (!target) return false;
  target.click();
  return true;
}

function go(key) {
  const names = { r: "run", b: "buffer", m: "mixing" };
  const links = [...document.querySelectorAll(".bar nav a")];
  const wanted = { r: "Run", b: "Buffer", m: "Mixing" }[key];
  const link = names[key] && (links.find((each) => each.textContent === wanted) ?? links.find((each) => each.textContent === "Runs"));
  if (link) location.href = link.href;
}

function toggleHelp() {
  const help = document.getElementById("help");
  if (help.open) help.close();
  else help.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest?.("input, textarea, select");
  if (field) {
    if (event.key === "Escape") field.blur();
    return;
  }
  if (event.defaultPrevented) return;
  if (awaiting === "g") {
    awaiting = null;
    go(event.key);
    return;
  }
  if (event.key === "?") toggleHelp();
  else if (document.getElementById("help").open) return;
  else if (event.key === "j") walk(1);
  else if (event.key === "k") walk(-1);
  else if (event.key === "g") awaiting = "g";
  else if (event.key === "/") {
    const search = document.querySelector("[data-search]");
    if (!search) return;
    search.closest("details")?.setAttribute("open", "");
    search.focus();
    search.select?.();
  } else if (event.key.length !== 1 || !press(event.key)) return;
  event.preventDefault();
});

document.addEventListener("click", (event) => {
  if (event.target.closest("#help-button")) toggleHelp();
  const copier = event.target.closest("[data-copy]");
  if (copier) copy(copier);
  const row = event.target.closest("[data-href]");
  if (row && !event.target.closest("a, button, input, label, summary") && !String(getSelection())) location.href = row.dataset.href;
});

const said = new WeakMap(); // button -> what will give it back its name

async function copy(button) {
  const source = document.querySelector(button.dataset.copy);
  // As the address is now: the page may have changed it. A token has left it before (see guard.py).
  if (source.id === "link") source.textContent = location.href;
  const text = source.value ?? source.textContent;
  // A second click within the time must not take what the first one says for the button's name.
  const name = button.dataset.name ??= button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    // Without permission, or over plain HTTP from another machine: it is selected, to be copied by hand.
    const range = document.createRange();
    range.selectNodeContents(source);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    button.textContent = "selected: press Ctrl-C";
  }
  clearTimeout(said.get(button));
  said.set(button, setTimeout(() => { button.textContent = name; }, 2000));
}

// A part of the page that could not be fetched says so: what stood there answers another question than the one asked.
function tellTrouble(event) {
  const { target, request } = event.detail.ctx ?? {};
  if (!target?.isConnected) return;
  const warning = document.createElement("p"), why = document.createElement("a");
  warning.className = "warning";
  warning.setAttribute("role", "alert");
  why.href = request.action;
  why.textContent = "See why.";
  warning.append("This could not be fetched. ", why);
  target.removeAttribute("aria-busy");
  target.replaceChildren(warning);
}

document.addEventListener("htmx:error", tellTrouble);
document.addEventListener("htmx:response:error", tellTrouble);

// A search in messages takes the server longer than a page may: the next part is asked for until the page is full.
async function searchOn() {
  const link = document.querySelector("[data-search-on]");
  if (!link) return;
  const answer = await fetch(link.dataset.searchOn).catch(() => null);
  if (!answer?.ok) return; // the link stays, and says why
  const part = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.querySelector("[data-rows]").append(...part.querySelectorAll("[data-rows] > tr"));
  document.getElementById("onward").replaceChildren(...part.getElementById("onward").childNodes);
  return searchOn();
}

searchOn();
