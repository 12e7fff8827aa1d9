// Parts that views share: cards, tables, tiles, legends, and the states of something that is read
// over the network (`Loaded`: loading, failed, empty, there). A number that another place shows too
// names its figure (`figures.js`), whose definition its label opens.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { FIGURES } from "./figures.js";
import { NONE, count, percent } from "./format.js";
import { Line } from "./text.js";

export function Card({ title, note, actions, children, kind = "", figures = "", ...more }) {
  return html`<section class=${`card ${kind}`} aria-label=${title} ...${more}>
    ${(title || actions) && html`<header class="card-head">
      <div>${defined(figures) ? html`<${Defined} figures=${figures} label=${html`<h2>${title}</h2>`} />`
        : html`<h2>${title}</h2>`}${note && html`<p class="note">${note}</p>`}</div>
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>`}
    ${children}
  </section>`;
}

/**
 * Large numbers in a row: `[name, value, link?, of?, label?]`. A name of `figures.js`, or several
 * with a space between them, has their labels; `of` says which step or version it is of.
 */
export function Tiles({ tiles }) {
  return html`<dl class="tiles">${tiles.map(([name, value, href, of, label]) => html`<div
    class="tile"><dt>${defined(name) ? html`<${Defined} figures=${name} label=${label} />` : name}</dt>
    <dd ...${numbers(name, of)}>${href ? html`<a href=${href}>${value}</a>` : value}</dd>
    </div>`)}</dl>`;
}

/** Label and definition of a figure; one of a task or of a k has that of its kind. */
function defined(name) {
  return FIGURES[String(name ?? "").split(" ")[0].split("/")[0]];
}

/** Attributes of an element that shows the numbers of these figures, in their order. */
function numbers(figures, of) {
  return defined(figures) ? { "data-figure": figures, "data-of": of ?? undefined } : {};
}

/** A label that opens the definitions of its figures. */
function Defined({ figures, label }) {
  const known = figures.split(" ").map(defined);
  return html`<details class="figure"><summary>${label ?? known.map(([word]) => word).join(" · ")}
    </summary>${known.map(([word, meaning]) =>
      html`<p>${known.length > 1 && `${word}: `}${meaning}</p>`)}</details>`;
}

/**
 * Reads `load(signal)` again when a value of `deps` changes. Returns `{ data, error, busy }`; the
 * data of the previous read stays until the next has come, so that nothing jumps. `error` of an
 * earlier read is gone once a later one succeeds.
 */
export function useLoaded(load, deps) {
  const [state, setState] = useState({ data: undefined, error: undefined, busy: true });
  useEffect(() => {
    const aborted = new AbortController();
    setState((old) => ({ ...old, busy: true }));
    load(aborted.signal).then(
      (data) => aborted.signal.aborted || setState({ data, error: undefined, busy: false }),
      (error) => aborted.signal.aborted
        || setState((old) => ({ data: old.data, error, busy: false })),
    );
    return () => aborted.abort();
  }, deps);
  return state;
}

/** Shows the children made from loaded data, or why there are none. */
export function Loaded({ state, empty = "Nothing here yet.", isEmpty = isNothing, children }) {
  const { data, error, busy } = state;
  if (error && data === undefined) return html`<${Failure} error=${error} />`;
  if (data === undefined) return html`<${Loading} />`;
  return html`${error && html`<${Failure} error=${error} />`}
    ${isEmpty(data) ? html`<p class="empty">${empty}</p>`
      : html`<div class=${busy ? "stale" : ""} aria-busy=${busy}>${children(data)}</div>`}`;
}

function isNothing(data) {
  return data === null || (Array.isArray(data) && data.length === 0);
}

function Loading() {
  return html`<p class="loading" role="status"><span class="spinner" aria-hidden="true"></span>
    Loading…</p>`;
}

export function Failure({ error }) {
  return html`<div class="failure" role="alert"><strong>This could not be read.</strong>
    <p><${Line} text=${error.message} limit=${600} /></p></div>`;
}

/**
 * A table. A column is `{ key, label, cell?, kind?, title?, figure? }`; `kind` "n" aligns numbers,
 * and of a `figure` the title is its definition. Rows with `href` open on a click; j and k walk over
 * their links (`keys.js`).
 */
export function Table({ columns, rows, href, label, sort, onSort, mark, limit = 0 }) {
  const [shown, setShown] = useState(limit || Infinity);
  const first = columns[0];
  const keys = rowKeys(href);
  const cell = (column, row) => {
    const value = column.cell ? column.cell(row) : row[column.key];
    return value === undefined || value === null ? NONE : value;
  };
  return html`<div class="table-box" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${columns.map((column) => html`<th scope="col" class=${column.kind ?? ""}
      title=${column.title ?? defined(column.figure)?.[1]} aria-sort=${sortState(sort, column)}>${onSort && column.sort !== false
        ? html`<button class="sort" onClick=${() => onSort(column.key)}>${column.label}${
          sort?.key === column.key ? (sort.down ? " ↓" : " ↑") : ""}</button>`
        : column.label}</th>`)}</tr></thead>
    <tbody>${rows.slice(0, shown).map((row) => html`<tr key=${keys(row)} class=${mark?.(row) ?? ""}>
      ${columns.map((column) => html`<td class=${column.kind ?? ""}
        ...${numbers(column.figure, column.figure?.startsWith("run.") ? null : row[first.key])}>${
        href && column === first
          ? html`<a class="row-link" href=${href(row)}>${cell(column, row)}</a>`
          : cell(column, row)}</td>`)}</tr>`)}</tbody>
  </table>${rows.length > shown && html`<button class="more" onClick=${() =>
    setShown(shown + limit)}>show more (${rows.length - shown} rows left)</button>`}</div>`;
}

/** Keys by what a row opens: a row that comes above others leaves the reader's focus on its own. */
function rowKeys(href) {
  const seen = new Map();
  return (row) => {
    if (!href) return undefined;
    const link = href(row), times = seen.get(link) ?? 0;
    seen.set(link, times + 1);
    return `${link} ${times}`;
  };
}

function sortState(sort, column) {
  if (sort?.key !== column.key) return undefined;
  return sort.down ? "descending" : "ascending";
}

/** Sorts rows in the browser; returns them and what `Table` needs for its heads. */
export function useSorted(rows, key, down = false) {
  const [sort, setSort] = useState({ key, down });
  const sorted = key === undefined && sort.key === undefined ? rows : rows.toSorted((a, b) => {
    const [x, y] = [a[sort.key], b[sort.key]];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1; // missing values come last either way
    if (y === null || y === undefined) return -1;
    return (x < y ? -1 : 1) * (sort.down ? -1 : 1);
  });
  const onSort = (next) => setSort({ key: next, down: next === sort.key ? !sort.down : true });
  return { rows: sorted, sort, onSort };
}

/** Several choices of which one holds, as buttons. */
export function Choice({ label, options, value, onChange }) {
  return html`<div class="choice" role="radiogroup" aria-label=${label}>
    ${options.map(([key, text, title]) => html`<button role="radio" title=${title}
      aria-checked=${key === value} class=${key === value ? "on" : ""}
      onClick=${() => onChange(key)}>${text}</button>`)}</div>`;
}

export function Select({ label, options, value, onChange }) {
  return html`<label class="field"><span>${label}</span><select value=${value}
    onChange=${(event) => onChange(event.target.value)}>${options.map(([key, text]) =>
      html`<option value=${key} selected=${key === value}>${text}</option>`)}</select></label>`;
}

export function Legend({ items }) {
  return html`<ul class="legend">${items.map(({ name, cls, note }) => html`<li>
    <i class=${`swatch ${cls}`} aria-hidden="true"></i>${name}${
      note && html` <span class="soft">${note}</span>`}</li>`)}</ul>`;
}

/** A share as a bar behind its number. */
export function Bar({ share, children }) {
  const ref = useRef(null);
  useEffect(() => {
    ref.current.style.setProperty("--share", `${100 * Math.max(0, Math.min(1, share || 0))}%`);
  }, [share]);
  return html`<span class="bar" ref=${ref}>${children}</span>`;
}

/** The way back to what contains the present thing. */
export function Crumbs({ parts }) {
  return html`<nav class="crumbs" aria-label="Breadcrumb"><ol>${parts.map(([text, href]) =>
    html`<li>${href ? html`<a href=${href}>${text}</a>` : html`<span>${text}</span>`}</li>`)}</ol>
  </nav>`;
}

/** A set of facts: `[term, description, figure?, of?]`; missing descriptions are left out. */
export function Facts({ facts }) {
  return html`<dl class="facts">${facts.filter(([, value]) =>
    ![null, undefined, "", false].includes(value)).map(([term, value, figure, of]) => html`<div>
      <dt title=${defined(figure)?.[1]}>${term}</dt><dd ...${numbers(figure, of)}>${value}</dd>
    </div>`)}</dl>`;
}

/** Horizontal bars: rows are `[label, value, text?, href?]`; without `text` a bar has its share. */
export function Bars({ rows, label, unit = "", most }) {
  if (!rows.length) return html`<p class="empty">Nothing to count.</p>`;
  const longest = most ?? (Math.max(...rows.map(([, value]) => value ?? 0)) || 1);
  const all = rows.reduce((sum, [, value]) => sum + (value ?? 0), 0) || 1;
  const share = (value) => `${count(value)}${unit && ` ${unit}`} · ${percent(value / all, 1)}`;
  return html`<div class="bars" role="table" aria-label=${label}>${rows.map(
    ([name, value, text, href]) => html`<${BarRow} name=${name} share=${(value ?? 0) / longest}
      href=${href} text=${text ?? share(value)} />`)}</div>`;
}

function BarRow({ name, share, text, href }) {
  const width = (element) => element?.style.setProperty("--share", `${100 * share}%`);
  const word = html`<${Line} text=${name} limit=${60} />`;
  return html`<div role="row" class="bar-row">
    <span role="rowheader" class="label">${href ? html`<a class="row-link" href=${href}>${word}</a>`
      : word}</span>
    <span role="presentation" class="bar-line"><i ref=${width}></i></span>
    <span role="cell">${text}</span></div>`;
}
