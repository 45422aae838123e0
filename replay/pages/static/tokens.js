// A segment's tokens, a block at a time: fetched and drawn when they come near the window, so that a hundred thousand
// open at once. Colours, the chosen token and the segment stand in the address. Text reaches the page as text only.

import { codePoint, visibleText } from "./scales.js";

const blockSize = 2048;
const near = "800px";
const dash = "\u2013";

const view = document.getElementById("tokens");
const { unit } = view.dataset;
const legend = document.getElementById("legend");
const detail = document.getElementById("detail");
const tip = document.getElementById("tip");
const styles = JSON.parse(document.getElementById("styles").textContent);
const total = Number(view.dataset.total);
const blocks = []; // { node, first, answer, spans, pending }
const invitation = [...detail.childNodes];
let chosen = Number(view.dataset.token);

// Scales: a token's value falls between two edges, which the legend shows.

const nats = (value) => value.toFixed(Math.abs(value) < 0.1 ? 2 : 1).replace(/\.0$/, "").replace("-", "\u2212");
const plain = (value) => String(value).replace("-", "\u2212");
const likely = [-0.05, -0.2, -0.5, -1, -2, -4, -8];
const scales = {
  behavior: { of: "behavior_log_probs", kind: "q", edges: likely, formatted: nats, says: "Log-prob in nats when the token was sampled: 0 is certain, \u22121 is 37\u00a0%." },
  current: { of: "current_log_probs", kind: "q", edges: likely, formatted: nats, says: "Log-prob in nats under the policy that scored it." },
  drift: { of: "drift", kind: "d", edges: [0.5, 0.67, 0.8, 0.95, 1.05, 1.25, 1.5, 2], formatted: plain, says: "exp(current \u2212 behavior): above 1 the token has become likelier since it was sampled." },
  advantage: { of: "advantages", kind: "d", edges: [-2, -1, -0.5, -0.1, 0.1, 0.5, 1, 2], formatted: plain, says: "What trained tokens were pushed by. One number per trajectory: what single turns were given is not stored." },
};

function bucket(scale, value) {
  const { edges } = scale;
  if (scale.kind === "q") {
    const at = edges.findIndex((edge) => value >= edge);
    return at < 0 ? edges.length : at;
  }
  const at = edges.findIndex((edge) => value < edge);
  return at < 0 ? edges.length : at;
}

function colourClass(answer, index) {
  const color = view.dataset.color;
  if (color === "mask") return answer.loss_mask[index] ? "m-trained" : answer.action_mask[index] ? "m-sampled" : "";
  const scale = scales[color];
  const value = scale && answer[scale.of]?.[index];
  return value == null ? "" : `${scale.kind}${bucket(scale, value)}`;
}

// Drawing

function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text != null) node.textContent = text;
  return node;
}

const simple = /^ ?[\x21-\x7e\u00a1-\u00ac\u00ae-\u02ff]+(?: [\x21-\x7e]+)* ?$/;

/** A token's text: tabs, ends of lines and spaces between which no text is are marked. */
function spell(node, text) {
  if (simple.test(text)) {
    node.textContent = text;
    return;
  }
  for (const part of text.split(/(\n|\t|^ +$| {2,})/)) {
    if (part === "\n") node.append(element("span", "space", "\u21b5"), "\n");
    else if (part === "\t") node.append(element("span", "space", "\u21e5"), "\t");
    else if (/^ +$/.test(part) && (part.length > 1 || part === text)) node.append(element("span", "space", "\u2423".repeat(part.length)));
    else if (part) node.append(visibleText(part));
  }
  if (!text) node.append(element("span", "space", "\u2205"));
}

function tokenClass(answer, index) {
  const part = answer.texts ? (answer.texts[index] == null ? " part" : "") : " id";
  const trained = answer.loss_mask[index] ? " trained" : "";
  return `t${part}${trained} ${colourClass(answer, index)}`.trimEnd();
}

function drawBlock(block) {
  const { answer } = block;
  block.node.replaceChildren();
  block.spans = [];
  let line = null;
  for (let index = 0; index < answer.token_ids.length; index += 1) {
    if (index === 0 || answer.authors[index] !== answer.authors[index - 1]) line = beginStretch(block, index);
    const span = element("span", tokenClass(answer, index));
    if (!answer.texts) span.textContent = String(answer.token_ids[index]);
    else if (answer.texts[index] == null) span.textContent = "\u2025";
    else spell(span, answer.texts[index]);
    span.dataset.at = block.first + index;
    block.spans.push(span);
    line.append(span);
  }
  block.node.classList.remove("loading");
  block.node.style.minHeight = "";
}

function beginStretch(block, index) {
  const { answer } = block;
  const name = answer.author_names[answer.authors[index]];
  const style = styles[name] ?? { shape: "\u25b7", kind: "other", word: "another author" };
  const stretch = element("div", `stretch by-${style.kind}`);
  const who = element("div", "who");
  const shape = element("span", "shape", style.shape);
  shape.setAttribute("aria-hidden", "true");
  who.append(shape, document.createTextNode(visibleText(name)));
  stretch.setAttribute("role", "group");
  stretch.setAttribute("aria-label", answer.turns[index] == null ? style.word : `${style.word}, ${unit} ${answer.turns[index]}`);
  if (answer.turns[index] != null) who.append(element("span", "turn-of", `${unit} ${answer.turns[index]}`));
  const line = element("div", "line");
  stretch.append(who, line);
  block.node.append(stretch);
  return line;
}

async function fill(block) {
  if (block.answer || block.pending) return block.pending;
  block.pending = load(block);
  await block.pending;
  block.pending = null;
}

async function load(block) {
  const query = new URLSearchParams({ segment: view.dataset.segment, first: block.first, count: blockSize });
  let problem;
  try {
    const response = await fetch(`${view.dataset.address}?${query}`);
    const answer = await response.json();
    if (response.ok) {
      block.answer = answer;
      drawBlock(block);
      return;
    }
    problem = answer.error;
  } catch (error) {
    problem = `The inspector does not answer (${error.message}).`;
  }
  const again = element("button", "quiet", "try again");
  again.addEventListener("click", () => fill(block));
  const warning = element("p", "warning trouble");
  warning.append(visibleText(problem), " ", again);
  block.node.replaceChildren(warning);
}

function layOut() {
  const perLine = Math.max(6, view.clientWidth / 34);
  for (let first = 0; first < total; first += blockSize) {
    const node = element("div", "block loading");
    const count = Math.min(blockSize, total - first);
    node.style.minHeight = `${Math.ceil(count / perLine) * 24}px`;
    blocks.push({ node, first, answer: null, spans: [], pending: null });
    view.append(node);
  }
  if (!total) view.append(element("p", "soft", "This segment has no tokens."));
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) fill(blocks.find((block) => block.node === entry.target));
  }, { rootMargin: near });
  for (const block of blocks) watcher.observe(block.node);
}

// Legend

function sample(className, text) {
  const row = element("li");
  row.append(element("span", `sample ${className || "unknown"}`, "a"), element("span", "", text));
  return row;
}

function drawLegend() {
  const color = view.dataset.color;
  const scale = scales[color];
  const list = element("ul", "scale");
  const says = element("p");
  const title = element("strong", "", { behavior: "behavior log-prob", current: "current log-prob" }[color] ?? color);
  if (scale) {
    says.textContent = scale.says;
    const { edges, formatted } = scale;
    const below = scale.kind === "q" ? edges : [...edges].reverse();
    // From the greatest to the least.
    for (let at = 0; at <= edges.length; at += 1) {
      const range = at === 0 ? `${formatted(below[0])} and more` : at === edges.length ? `less than ${formatted(below[at - 1])}` : `${formatted(below[at])} to ${formatted(below[at - 1])}`;
      list.append(sample(`${scale.kind}${scale.kind === "q" ? at : edges.length - at}`, range));
    }
    list.append(sample("", color === "advantage" ? "not trained" : color === "behavior" ? "not sampled, or unknown" : "not sampled, or not scored"));
  } else if (color === "mask") {
    says.textContent = "Trained tokens carry loss. Log-probs are there for every sampled one.";
    list.append(sample("m-trained", "trained"), sample("m-sampled", "sampled, not trained"), sample("", "not sampled"));
  } else {
    says.textContent = "Who wrote each token: by shape, colour and name. Trained ones are underlined.";
  }
  legend.replaceChildren(title, says, list);
}

function recolour(color) {
  view.dataset.color = color;
  for (const block of blocks) block.spans.forEach((span, index) => {
    const kept = span.classList.contains("chosen") ? " chosen" : "";
    span.className = tokenClass(block.answer, index) + kept;
  });
  for (const link of document.querySelectorAll("[data-color].button")) {
    if (link.dataset.color === color) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  drawLegend();
  remember();
}

function remember() {
  const query = new URLSearchParams(location.search);
  query.set("view", "tokens");
  query.set("segment", view.dataset.segment);
  query.set("color", view.dataset.color);
  if (chosen >= 0) query.set("token", chosen);
  else query.delete("token");
  history.replaceState(null, "", `${location.pathname}?${query}${location.hash}`);
}

// One token

const blockOf = (at) => blocks[Math.floor(at / blockSize)];
const formatted = (value, digits = 4) => (value == null ? dash : value.toFixed(digits).replace("-", "\u2212"));

function facts(at) {
  const { answer, first } = blockOf(at);
  const index = at - first;
  const behavior = answer.behavior_log_probs[index];
  const name = answer.author_names[answer.authors[index]];
  const mask = answer.loss_mask[index] ? "trained" : answer.action_mask[index] ? "sampled or spoken, not trained" : "not sampled";
  const where = answer.advantage.iteration == null ? "when it was collected" : `in iteration ${answer.advantage.iteration}`;
  return {
    text: answer.texts?.[index],
    rows: [
      ["token", `${at.toLocaleString("en-US")} of ${total.toLocaleString("en-US")}`],
      ["id", String(answer.token_ids[index])],
      ["author", `${styles[name]?.shape ?? ""} ${visibleText(name)}`],
      ["mask", mask],
      ["behavior", behavior == null ? dash : `${formatted(behavior)} nats (${(100 * Math.exp(behavior)).toPrecision(3)}\u00a0%)`],
      ["current", answer.current_log_probs ? (answer.current_log_probs[index] == null ? dash : `${formatted(answer.current_log_probs[index])} nats, policy ${answer.scored_by.policy_version}`) : "never scored"],
      ["drift", answer.drift ? formatted(answer.drift[index]) : "never scored"],
      ["advantage", answer.advantages[index] == null ? dash : `${formatted(answer.advantages[index], 3)} ${where}`],
      ["policy", answer.policy_versions[index] == null ? dash : `version ${answer.policy_versions[index]}`],
      [unit, answer.turns[index] == null ? dash : String(answer.turns[index])],
    ],
  };
}

function showDetail(at) {
  const { text, rows } = facts(at);
  const list = element("dl");
  for (const [name, value] of rows) list.append(element("dt", "", name), element("dd", "", value));
  const parts = [];
  if (text != null) {
    const exact = element("code", "exact");
    spell(exact, text);
    parts.push(exact);
    const odd = [...text].filter((each) => each > "\u007e" || each < " ");
    if (odd.length) list.append(element("dt", "", "characters"), element("dd", "", odd.slice(0, 8).map(codePoint).join(" ")));
  } else if (blockOf(at).answer.texts) {
    parts.push(element("p", "soft", "A part of the character that begins before it."));
  }
  const close = element("button", "quiet close", "close");
  close.addEventListener("click", letGo);
  detail.replaceChildren(close, ...parts, list);
  detail.classList.add("filled");
}

async function choose(at, { focus = true, scroll = "nearest" } = {}) {
  if (at < 0 || at >= total) return;
  const block = blockOf(at);
  if (!block.answer) {
    block.node.scrollIntoView({ block: "start" });
    await fill(block);
    if (!block.answer) return;
  }
  unmark();
  chosen = at;
  const span = block.spans[at - block.first];
  span.classList.add("chosen");
  span.tabIndex = 0;
  if (focus) span.focus({ preventScroll: true });
  span.scrollIntoView({ block: scroll });
  showDetail(at);
  remember();
}

function unmark() {
  const before = view.querySelector(".chosen");
  before?.classList.remove("chosen");
  before?.removeAttribute("tabindex");
}

/** No token is chosen: on a small screen its numbers cover the text. */
function letGo() {
  unmark();
  chosen = -1;
  detail.replaceChildren(...invitation);
  detail.classList.remove("filled");
  remember();
}

const spanOf = (event) => event.target.closest?.(".t");

view.addEventListener("click", (event) => {
  const span = spanOf(event);
  if (span && !String(getSelection())) choose(Number(span.dataset.at));
});

view.addEventListener("pointermove", (event) => {
  const span = event.pointerType === "mouse" && spanOf(event);
  tip.classList.toggle("hidden", !span);
  if (!span) return;
  const { text, rows } = facts(Number(span.dataset.at));
  const known = rows.filter(([, value]) => value !== dash && value !== "never scored");
  tip.textContent = (text == null ? "" : `\u201c${visibleText(text).replaceAll("\n", "\u21b5")}\u201d\n`) + known.map((row) => row.join(" ")).join("\n");
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
});
view.addEventListener("pointerleave", () => tip.classList.add("hidden"));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea, dialog")) return;
  if (event.key === "Escape" && chosen >= 0) letGo();
  const to = {
    ArrowRight: () => chosen + 1,
    ArrowLeft: () => Math.max(0, chosen - 1),
    ...(view.contains(event.target) && { Home: () => 0, End: () => total - 1 }),
  }[event.key];
  if (!to) return;
  event.preventDefault();
  choose(to());
});

for (const link of document.querySelectorAll("[data-color].button")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    recolour(link.dataset.color);
  });
}

layOut();
drawLegend();
if (chosen >= 0) choose(Math.min(chosen, total - 1), { scroll: "center" });
