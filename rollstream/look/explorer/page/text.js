// Shows text of a run as text. What a model or a tool wrote is hostile: it never becomes markup, its
// invisible characters become visible marks, its direction cannot leave its own box, and its size
// on the page is bounded. Every view shows strings of the run through this file.

import { html, useState } from "./vendor/preact.js";

const SHOWN = 4000; // characters of a text before "show more"
const MORE = 40000; // characters that each "show more" adds

const NAMES = new Map([
  [0x7f, "DEL"], [0x85, "NEL"], [0xad, "SHY"], [0x61c, "ALM"], [0x200b, "ZWSP"], [0x200c, "ZWNJ"],
  [0x200d, "ZWJ"], [0x200e, "LRM"], [0x200f, "RLM"], [0x2028, "LS"], [0x2029, "PS"],
  [0x202a, "LRE"], [0x202b, "RLE"], [0x202c, "PDF"], [0x202d, "LRO"], [0x202e, "RLO"],
  [0x2060, "WJ"], [0x2066, "LRI"], [0x2067, "RLI"], [0x2068, "FSI"], [0x2069, "PDI"],
  [0xfeff, "BOM"], [0xfffd, "U+FFFD"],
]);

// C0 but newline, DEL and C1, soft hyphen, marks of direction, characters without width, tags,
// interlinear marks, halves of surrogate pairs.
const UNSEEN =
  /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffd\p{Cs}\u{e0000}-\u{e007f}]/gu;

/** Returns the text as parts in order: strings, and `{ code, label }` for an invisible character. */
export function visibleParts(text) {
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(UNSEEN)) {
    if (match.index > from) parts.push(text.slice(from, match.index));
    const code = match[0].codePointAt(0);
    parts.push({ code, label: markLabel(code) });
    from = match.index + match[0].length;
  }
  if (from < text.length) parts.push(text.slice(from));
  return parts;
}

function markLabel(code) {
  if (code === 9) return "⇥";
  if (code === 13) return "␍";
  if (code < 0x20) return String.fromCodePoint(0x2400 + code); // Unicode's own control pictures
  return NAMES.get(code) ?? codeName(code);
}

function codeName(code) {
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Text on one line, cut off at `limit` characters: names, reasons, cells of a table. */
export function Line({ text, limit = 200 }) {
  const whole = String(text ?? "");
  const cut = whole.length > limit;
  return html`<bdi class="run-text line">${marked(cut ? whole.slice(0, limit) : whole)}${
    cut && html`<span class="cut" title=${`${whole.length} characters`}>…</span>`}</bdi>`;
}

/** A text of any length with its line breaks; a long one has a button for more of it. */
export function Block({ text, shown = SHOWN }) {
  const whole = String(text ?? "");
  const [limit, setLimit] = useState(shown);
  const rest = whole.length - limit;
  return html`<div class="run-text block" dir="ltr">${marked(whole.slice(0, limit))}${
    rest > 0 && html`<button class="more" onClick=${() => setLimit(limit + MORE)}>
      show more (${rest.toLocaleString("en")} characters left)</button>`}</div>`;
}

/** The children that show a string: plain text, and a mark for each invisible character. */
export function marked(text) {
  return visibleParts(text).map((part) =>
    typeof part === "string"
      ? part
      : html`<span class="mark" title=${codeName(part.code)}>${part.label}</span>`);
}
