// The table of trajectories that steps, maps and search share, and the small pieces of a row.

import { html } from "../vendor/preact.js";
import { count, duration, fixed, moment, number } from "../format.js";
import { Table } from "../parts.js";
import { link } from "../router.js";
import { Line } from "../text.js";

/** The address of a trajectory's view. */
export function trajectoryLink(run, name, query) {
  return link("r", [run, "trajectories", name], query);
}

export function groupLink(run, group) {
  return link("r", [run, "groups", group]);
}

export function stepLink(run, step) {
  return link("r", [run, "steps", step]);
}

/** The address of the record at `{ partition, offset }` of a topic. */
export function recordLink(run, topic, at) {
  return link("r", [run, "records", topic, at.partition, at.offset]);
}

export function Finish({ finish, reason }) {
  const kind = finish === "dead" ? "bad" : "";
  return html`<span class=${`badge ${kind}`} title=${reason
    || undefined}>${finish ?? "running"}</span>`;
}

/** `v3`, or `v3 → v5` if the weights changed on the way. */
export function Versions({ row }) {
  if (row.version === null || row.version === undefined) return "–";
  return row.version_last !== null && row.version_last !== row.version
    ? `v${row.version}\u202f→\u202fv${row.version_last}` : `v${row.version}`;
}

const COLUMNS = (run) => [
  { key: "trajectory", label: "trajectory", cell: (r) => html`<${Line} text=${r.trajectory} />` },
  { key: "task", label: "task", kind: "keep", cell: (r) => html`<${Line} text=${r.task}
    limit=${28} />` },
  { key: "reward", label: "reward", kind: "n", figure: "trajectory.reward",
    cell: (r) => fixed(r.reward) },
  { key: "tokens", label: "tokens", kind: "n", figure: "trajectory.tokens",
    cell: (r) => count(r.tokens) },
  { key: "finish", label: "finish", cell: (r) => html`<${Finish} ...${r} />` },
  { key: "version", label: "versions", kind: "n", cell: (r) => html`<${Versions} row=${r} />` },
  { key: "lag", label: "lag at finish", kind: "n", figure: "trajectory.lag_finish",
    cell: (r) => count(r.lag) },
  { key: "step", label: "step", kind: "n", cell: (r) => r.step === null ? "–"
    : html`<a href=${stepLink(run, r.step)}>${count(r.step)}</a>` },
  { key: "group", label: "group", kind: "n", cell: (r) =>
    html`<a href=${groupLink(run, r.group)}>${r.group}</a>` },
  { key: "rollout", label: "rollout", kind: "keep", cell: (r) => html`<${Line} text=${r.rollout}
    limit=${28} />` },
  { key: "seconds", label: "took", kind: "n", cell: (r) => duration(r.finished_s - r.started_s) },
];

/** Trajectories as a table whose rows open; `more` are columns to add at the end. */
export function TrajectoryTable({ run, rows, label, more = [], query, without = [] }) {
  const isOneTask = new Set(rows.map((row) => row.task)).size < 2;
  const left = isOneTask ? [...without, "task"] : without;
  const columns = [...COLUMNS(run).filter((c) => !left.includes(c.key)), ...more];
  return html`<${Table} label=${label} columns=${columns} rows=${rows} limit=${200}
    href=${(row) => trajectoryLink(run, row.trajectory, query)} />`;
}

export const GROUP_COLUMNS = (run) => [
  { key: "group", label: "group", cell: (g) => String(g.group) },
  { key: "task", label: "task", kind: "keep", cell: (g) => html`<${Line} text=${g.task}
    limit=${28} />` },
  { key: "ended", label: "ended", cell: (g) => html`<${Ended} group=${g} />` },
  { key: "reward_mean", label: "reward", kind: "n", figure: "group.reward_mean",
    cell: (g) => fixed(g.reward_mean) },
  { key: "reward_std", label: "± std", kind: "n", figure: "group.reward_std",
    cell: (g) => fixed(g.reward_std) },
  { key: "tokens_mean", label: "mean tokens", kind: "n", figure: "group.tokens_mean",
    cell: (g) => number(g.tokens_mean) },
  { key: "finished", label: "finished", kind: "n", figure: "group.finished group.samples",
    cell: (g) =>
    `${count(g.finished)} of ${count(g.samples)}` },
  { key: "step", label: "step", kind: "n", cell: (g) => g.step === null ? "–"
    : html`<a href=${stepLink(run, g.step)}>${count(g.step)}</a>` },
  { key: "wave", label: "wave", kind: "n", cell: (g) => count(g.wave) },
  { key: "admitted_s", label: "admitted (UTC)", kind: "n", cell: (g) => moment(g.admitted_s) },
];

/** How a group ended, and why. */
export function Ended({ group }) {
  const kind = { dead: "bad", expired: "bad", trained: "good" }[group.ended] ?? "";
  return html`<span class=${`badge ${kind}`}>${group.ended}</span>${group.detail
    && html` <span class="soft"><${Line} text=${group.detail} limit=${160} /></span>`}`;
}
