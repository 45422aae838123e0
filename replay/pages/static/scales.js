// Numbers and texts for people, as replay/pages/charts.py and templating.py have them; and how values lie on axes.

export function formatted(value, percent = false) {
  if (value == null) return "\u2013";
  if (percent) {
    const rounded = digits(100 * value, 3);
    return `${rounded === "100" ? digits(100 * value, 5) : rounded}\u00a0%`;
  }
  const size = Math.abs(value);
  if (size < 1e-12) return "0"; // an error of rounding
  if (!(size >= 1e-3 && size < 1e6)) return digits(value, 2);
  return size >= 1000 ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : digits(value, 3);
}

function digits(value, count) {
  const size = Math.abs(value);
  const isPlain = size === 0 || (size >= 1e-4 && size < 1e15);
  return isPlain ? String(Number(value.toPrecision(count))) : value.toExponential(count - 1).replace(/\.?0*e/, "e");
}

// A line's value at a place, on the straight way between two points; null beyond its ends.
export function valueAt(points, place) {
  let first = 0, after = points.length; // halved until `after` is the first point beyond the place
  while (first < after) {
    const middle = Math.floor((first + after) / 2);
    if (points[middle][0] <= place) first = middle + 1;
    else after = middle;
  }
  const [at, value] = points[after - 1] ?? [];
  if (at === place) return value;
  if (after === 0 || after === points.length) return null;
  const [next, other] = points[after];
  return value + (other - value) * (place - at) / (next - at);
}

export function range(chart, low, high) {
  const axis = chart.axis;
  if (axis.whole) return [0, 1];
  if (axis.reference != null) [low, high] = [Math.min(low, axis.reference), Math.max(high, axis.reference)];
  if (axis.from_zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (high - low <= Math.max(axis.least_span, 1e-9 * Math.max(Math.abs(high), 1))) {
    const span = axis.least_span || 1;
    low = axis.from_zero ? low : (low + high - span) / 2;
    high = low + span;
  }
  const room = 0.06 * (high - low);
  return [axis.from_zero && low === 0 ? low : low - room, axis.from_zero && high === 0 && low < 0 ? high : high + room];
}

// Of a logarithmic axis: it ends on 1, 2 or 5 times a power of ten, and shows these, or powers alone where it is long.

function logMarks(low, high) {
  const first = Math.floor(Math.log10(low)) - 1, last = Math.ceil(Math.log10(high)) + 1, marks = [];
  for (let power = first; power <= last; power++) for (const factor of [1, 2, 5]) marks.push(Number(`${factor}e${power}`));
  return marks;
}

export function logRange(low, high) {
  const marks = logMarks(low, high);
  return [marks.filter((mark) => mark <= low * 1.01).at(-1), marks.find((mark) => mark >= high * 0.99)];
}

export function logSplits(low, high) {
  const marks = logMarks(low, high).filter((mark) => mark >= low && mark <= high);
  if (high / low <= 100) return marks;
  const powers = marks.filter((mark) => Math.abs(Math.log10(mark) % 1) < 1e-9), every = Math.max(1, Math.ceil(powers.length / 6));
  return powers.filter((_, index) => index % every === 0);
}

export function isLogarithmic(chart) {
  if (!chart.axis.log_if_wide) return false;
  const values = chart.curves.flatMap((curve) => curve.points.map((point) => point[1]));
  if (chart.axis.reference != null) values.push(chart.axis.reference);
  let low = Infinity, high = -Infinity;
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return low > 0 && high / low > 10;
}

// As short as they can be while no two are alike.
export function tickTexts(splits, percent, isLog) {
  const known = splits.filter((split) => split != null);
  const largest = Math.max(...known.map(Math.abs), 0);
  const [factor, unit] = percent ? [100, "\u00a0%"] : isLog ? [1, ""] : largest >= 1e6 ? [1e-6, "M"] : largest >= 1e4 ? [1e-3, "k"] : [1, ""];
  for (let count = 3; count < 12; count++) {
    const texts = splits.map((split) => split == null ? "" : digits(split * factor, count) + (split || percent ? unit : ""));
    if (new Set(texts.filter(Boolean)).size === known.length || count === 11) return texts;
  }
  return [];
}

const unseen = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu;

export const codePoint = (character) => `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

// What can't be seen, or would change how the rest is read, is written out; line breaks and tabs stay.
export function visibleText(text) {
  return text.replace(unseen, (character) => "\n\t".includes(character) ? character : `<${codePoint(character)}>`);
}
