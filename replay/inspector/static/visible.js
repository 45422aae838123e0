// Text as it is: characters that can't be seen, or that change how others are read, are written out. The table is the
// one that replay/inspector/text/visible.py reads; text reaches the page through textContent only.

const table = await (await fetch(new URL("visible.json", import.meta.url))).json();
const escaped = (code) => `\\u{${code.toString(16)}}`;
const parts = table.ranges.map(([first, last]) => `${escaped(first)}-${escaped(last)}`).join("");
const kept = [...table.kept].map((character) => escaped(character.codePointAt(0))).join("");
const unseen = new RegExp(`(?:(?![${kept}])[${parts}])+`, "gu");
const mostNamed = 3;

export const codePoint = (character) => `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

export function mark(character) {
  const code = character.codePointAt(0);
  const name = table.names[code] ?? (code === 0x7f ? "DEL" : codePoint(character));
  return `\u27e8${name}\u27e9`;
}

/** What a character of the table is; undefined for one that is seen. */
export function unseenName(character) {
  const code = character.codePointAt(0);
  return table.ranges.find(([first, last]) => first <= code && code <= last)?.[2];
}

/** For titles and other places without markup. */
export function visibleText(text) {
  return text.replace(unseen, (run) => [...run].map(mark).join(""));
}

/** Nodes for a page: marks have a title that says what they are. */
export function visible(text) {
  const nodes = document.createDocumentFragment();
  let end = 0;
  for (const found of text.matchAll(unseen)) {
    nodes.append(text.slice(end, found.index), marked(found[0]));
    end = found.index + found[0].length;
  }
  nodes.append(text.slice(end));
  return nodes;
}

function marked(run) {
  const node = document.createElement("span");
  node.className = "unseen";
  node.title = [...new Set(run)].slice(0, mostNamed).map((each) => `${codePoint(each)} ${unseenName(each)}`).join(", ");
  node.textContent = [...run].map(mark).join("");
  return node;
}
