// Search over all trajectories: text or a regular expression in prompts and answers, and filters by
// reward, lag, length, task, finish, rollout, version. The whole search is in the address.

import { html, useEffect, useState } from "../vendor/preact.js";
import { get, runPath, useApi } from "../api.js";
import { count, duration } from "../format.js";
import { Card, Choice, Failure, Loaded, Select } from "../parts.js";
import { adjust, link } from "../router.js";
import { Line } from "../text.js";
import { TrajectoryTable } from "./rows.js";

const NUMBERS = [["reward", "reward"], ["group_reward", "group's reward"], ["lag", "lag"],
  ["tokens", "tokens"]];
const ORDERS = [["", "newest"], ["oldest", "oldest"], ["-reward", "highest reward"],
  ["reward", "lowest reward"],
  ["-tokens", "longest"], ["tokens", "shortest"], ["-lag", "most stale"]];
const FIELDS = ["q", "mode", "in", "task", "finish", "rollout", "step", "group", "version", "name",
  "ended", "order",
  ...NUMBERS.flatMap(([name]) => [`${name}_min`, `${name}_max`])];
const PRESETS = [
  ["never solved, longest first", { group_reward_max: 0, order: "-tokens" }],
  ["always solved", { group_reward_min: 1 }],
  ["cut at the limit", { finish: "length", order: "-tokens" }],
  ["dead", { finish: "dead" }],
  ["most stale", { order: "-lag" }],
  ["filtered groups", { ended: "filtered" }],
];

export default function Search({ run, query, listed }) {
  const filters = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) ?? ""]));
  const active = Object.entries(filters).filter(([name, value]) => value !== ""
    && name !== "order");
  return html`<header class="page-head"><div><h1>Search</h1>
      <p class="note">Every trajectory of the run, by what it says and by what became of it.</p></div>
      ${listed.sql && html`<a class="chip" href=${link("r", [run.run, "sql"])}>SQL</a>`}</header>
    <${Fields} filters=${filters} tasks=${run.settings?.tasks} />
    <div class="chips">${PRESETS.map(([word, preset]) => html`<a class="chip" href=${link("r",
      [run.run, "search"], preset)}>${word}</a>`)}
      ${active.length > 0 && html`<a class="chip bad" href=${link("r",
        [run.run, "search"])}>clear</a>`}</div>
    <${Results} run=${run} filters=${filters} label="Found trajectories" />`;
}

function Fields({ filters, tasks }) {
  const set = (name) => (value) => adjust({ [name]: value });
  const isOpen = NUMBERS.some(([name]) => filters[`${name}_min`] || filters[`${name}_max`])
    || ["rollout", "step", "version", "name", "group", "ended"].some((name) => filters[name]);
  return html`<div role="search"><div class="form">
      <label class="field wide"><span>text</span><${Typed} type="search" value=${filters.q}
        onChange=${set("q")} /></label>
      <${Choice} label="Kind of text" value=${filters.mode} onChange=${set("mode")}
        options=${[["", "plain"], ["re", "regex", "RE2 syntax"]]} />
      <${Choice} label="Where" value=${filters.in} onChange=${set("in")} options=${[["", "answers"],
        ["prompt", "prompts"], ["all", "all"]]} />
      ${Array.isArray(tasks) && tasks.length > 1 && html`<${Select} label="task"
        value=${filters.task} onChange=${set("task")}
        options=${[["", "any"], ...tasks.map((t) => [t, t])]} />`}
      <${Select} label="finish" value=${filters.finish} onChange=${set("finish")}
        options=${[["", "any"], ["stop", "stop"], ["length", "length"], ["dead", "dead"]]} />
      <${Select} label="order" value=${filters.order} onChange=${set("order")}
        options=${ORDERS} /></div>
    <details class="more-filters" open=${isOpen}><summary>More filters</summary><div class="form">
      ${NUMBERS.map(([name, word]) => ["min", "max"].map((end) => html`<label class="field short">
        <span>${word} ${end === "min" ? "≥" : "≤"}</span>
        <${Typed} type="number" value=${filters[`${name}_${end}`]}
          onChange=${set(`${name}_${end}`)} /></label>`))}
      ${["step", "version", "group"].map((name) => html`<label class="field short">
        <span>${name}</span><${Typed} type="number" value=${filters[name]}
        onChange=${set(name)} /></label>`)}
      ${["name", "rollout"].map((name) => html`<label class="field"><span>${name === "name"
        ? "name begins with" : name}</span><${Typed} type="text" value=${filters[name]}
        onChange=${set(name)} /></label>`)}
      <${Select} label="group ended" value=${filters.ended} onChange=${set("ended")}
        options=${[["", "any"], ...["trained", "filtered", "expired",
        "dead", "open"].map((e) => [e, e])]} />
    </div></details></div>`;
}

/** A field that applies what was typed after a short rest, or at once with enter. */
function Typed({ value, onChange, type }) {
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]);
  useEffect(() => {
    if (text === value) return undefined;
    const timer = setTimeout(() => onChange(text), 350);
    return () => clearTimeout(timer);
  }, [text]);
  return html`<input type=${type} step="any" value=${text} onInput=${(event) =>
    setText(event.target.value)}
    onKeyDown=${(event) => event.key === "Enter" && onChange(text)} />`;
}

/** The trajectories that meet the filters, with a button for the next ones. */
export function Results({ run, filters, label }) {
  const path = runPath(run.run, "search");
  const state = useApi(path, filters, { run: run.run });
  return html`<${Loaded} state=${state} isEmpty=${() => false}>${(first) =>
    html`<${Pages} key=${JSON.stringify(filters)} run=${run} path=${path} filters=${filters}
      first=${first} label=${label} />`}</${Loaded}>`;
}

function Pages({ run, path, filters, first, label }) {
  const [later, setLater] = useState([]);
  const [error, setError] = useState(null);
  const pages = [first, ...later];
  const last = pages.at(-1);
  const rows = [...new Map(pages.flatMap((page) =>
    page.rows).map((row) => [row.trajectory, row])).values()];
  const more = () => get(path, { ...filters, cursor: last.next }).then((page) =>
    setLater([...later, page]), setError);
  const match = { key: "match", label: "found", cell: (row) => row.match && html`<${Found}
    match=${row.match} />` };
  return html`<${Card} title=${label} note=${html`<span
    role="status">${summary(pages, rows.length)}</span>`}>
    ${rows.length ? html`<${TrajectoryTable} run=${run.run} rows=${rows} label=${label}
      more=${rows.some((r) => r.match) ? [match] : []} />`
      : html`<p class="empty">${last.next ? "Nothing in what was read so far."
        : "No trajectory is so."}</p>`}
    ${last.next && html`<button class="more" onClick=${more}>${last.complete === false ? "search on"
      : "more"}</button>`}
    ${error && html`<${Failure} error=${error} />`}</${Card}>`;
}

function summary(pages, shown) {
  const last = pages.at(-1);
  const scanned = pages.reduce((sum, page) => sum + (page.scanned ?? 0), 0);
  if (last.matched !== null && last.matched !== undefined) {
    return `${count(last.matched)} of ${count(last.total)}, ${duration(pages[0].seconds)}`;
  }
  return `${count(shown)} found; ${last.next ? `${count(scanned)} of ${count(last.total)} read`
    : "all read"}`;
}

function Found({ match }) {
  return html`<span class="found"><${Line} text=${match.before.slice(-40)} /><mark><${Line}
    text=${match.text} limit=${120} /></mark><${Line}
    text=${match.after} limit=${40} /></span>`;
}
