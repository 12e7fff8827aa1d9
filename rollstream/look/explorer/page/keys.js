// Keyboard moves: j/k walk over the links of the rows in view, [ and ] open the previous and the
// next of a kind, / searches, g and a letter opens a view, esc goes up, ? shows this list. Keys that
// are typed into a field, or with a modifier, are left alone.

import { html, useEffect, useRef } from "./vendor/preact.js";

const KEYS = [
  ["j / k", "next and previous row"],
  ["enter", "open the row"],
  ["[ / ]", "previous and next step, group or trajectory"],
  ["/", "search"],
  ["g then a letter", "open a view: the letters stand beside the views"],
  ["esc", "close, leave a field, or go up"],
  ["+ − ← →", "zoom and move the swimlanes; arrows walk over tokens"],
  ["t", "light or dark"],
  ["?", "this list"],
];

/** Binds the keys; `actions` are `search()`, `up()`, `help()`, `theme()` and `open(letter)`. */
export function useKeys(actions) {
  const present = useRef(actions);
  present.current = actions;
  useEffect(() => {
    let isGoing = false; // after g, until the next key
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      if (document.querySelector("dialog[open]")) return;
      if (isField(event.target)) {
        if (event.key === "Escape") event.target.blur();
        return;
      }
      const wasGoing = isGoing;
      isGoing = event.key === "g" && !wasGoing;
      const act = wasGoing ? () => present.current.open(event.key) : action(event.key);
      if (act && act() !== false) event.preventDefault();
    };
    const action = (key) => ({
      j: () => walk(1), k: () => walk(-1),
      "[": () => follow("prev"), "]": () => follow("next"),
      "/": () => present.current.search(), Escape: () => present.current.up(),
      "?": () => present.current.help(), t: () => present.current.theme(),
    })[key];
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

function isField(element) {
  return element.matches?.("input, textarea, select, [contenteditable]");
}

function walk(step) {
  const links = [...document.querySelectorAll("main .row-link")];
  if (!links.length) return follow(step > 0 ? "next" : "prev");
  const at = links.indexOf(document.activeElement);
  const next = at < 0 ? (step > 0 ? 0 : links.length - 1) : at + step;
  links[Math.max(0, Math.min(links.length - 1, next))].focus();
  return true;
}

function follow(rel) {
  const found = document.querySelector(`main a[rel="${rel}"]`);
  if (!found) return false;
  found.click();
  return true;
}

export function Help({ isOpen, onClose }) {
  const dialog = useRef(null);
  useEffect(() => {
    if (isOpen && !dialog.current.open) dialog.current.showModal();
    if (!isOpen && dialog.current.open) dialog.current.close();
  }, [isOpen]);
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="help-title">
    <h2 id="help-title">Keys</h2>
    <dl>${KEYS.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl>
    <p class="soft">Every view has its own address: copy it from the browser to send what you see.</p>
    <button onClick=${onClose}>Close</button>
  </dialog>`;
}

/** Links to the previous and the next of a kind, which [ and ] follow. */
export function Neighbours({ previous, next, what }) {
  return html`<div class="actions">
    ${previous && html`<a class="chip" rel="prev" href=${previous}>← previous ${what}</a>`}
    ${next && html`<a class="chip" rel="next" href=${next}>next ${what} →</a>`}</div>`;
}
