// Two runs (or a run and its replay under another loss) side by side: which settings differ, how
// they ended, the first step whose bits differ, and one step with the advantages of each.

import { html } from "../vendor/preact.js";
import { useApi } from "../api.js";
import { count, fixed, number } from "../format.js";
import { Neighbours } from "../keys.js";
import { Bar, Card, Crumbs, Loaded, Table } from "../parts.js";
import { adjust, go, link } from "../router.js";
import { Line } from "../text.js";
import { Compared } from "./overview.js";
import { trajectoryLink } from "./rows.js";

export default function Compare({ rest, query, listed }) {
  const asked = (query.get("runs") ?? "").split(",").filter((one) => listed.runs.some((known) =>
    known.run === one));
  const runs = asked.length ? asked : listed.runs.slice(0, 2).map((one) => one.run);
  const names = runs.map((one) => listed.runs.find((known) => known.run === one).name);
  if (runs.length < 2) return html`<h1>Compare</h1><p
    class="empty">Name several runs: <code>rollstream explore RUN RUN</code>.</p>`;
  return rest[0] === "steps" ? html`<${CompareStep} step=${rest[1]} runs=${runs} names=${names} />`
    : html`<${CompareRuns} runs=${runs} names=${names} listed=${listed} />`;
}

function CompareRuns({ runs, names, listed }) {
  const state = useApi("compare", { runs: runs.join(",") }, { run: runs[0] });
  const toggled = (one) => runs.includes(one) ? runs.filter((r) => r !== one) : [...runs, one];
  return html`<header class="page-head"><div><h1>Compare</h1><p
    class="note">Runs side by side.</p></div>
      <div class="actions">${listed.runs.length > 2 && listed.runs.map((one) => html`<button
        class="chip" aria-pressed=${runs.includes(one.run)}
        onClick=${() => adjust({ runs: toggled(one.run).join(",") })}>${runs.includes(one.run)
          ? "✓ " : ""}<${Line} text=${one.name} limit=${40} /></button>`)}</div></header>
    <${Loaded} state=${state}>${(data) => html`<${Bits} data=${data} runs=${runs} />
      <${Compared} runs=${runs} onPick=${(step) => go("compare", ["steps", step], {
        runs: runs.join(",") })} />
      <${Settings} settings=${data.settings} names=${names} />
      <${Finals} final=${data.final} names=${names} />`}</${Loaded}>`;
}

function Bits({ data, runs }) {
  const [first, last] = data.common_steps ?? [];
  if (first === undefined) return html`<p class="hint">The runs have no step in common.</p>`;
  const open = (step) => link("compare", ["steps", step], { runs: runs.join(",") });
  return html`<p
    class="hint">Steps ${count(first)} to ${count(last)} are in all of them. ${!data.has_hashes
    ? "Not all have a hash of their state." : data.first_difference === null ? "Each has the same state hash: the same bits." : html`The first whose state differs is <a
      href=${open(data.first_difference)}>step ${count(data.first_difference)}</a>.`}
    ${" "}<a href=${open(last)}>Compare step ${count(last)}</a>.</p>`;
}

function Settings({ settings, names }) {
  return html`<${Card} title="Settings that differ">${settings.length ? html`<${Table}
    label="Settings that differ" rows=${settings} limit=${100} columns=${[
    { key: "name", label: "setting", kind: "keep", cell: (s) => html`<code><${Line} text=${s.name}
      limit=${60} /></code>` },
    ...names.map((name, n) => ({ key: `v${n}`, label: html`<${Line} text=${name} limit=${40} />`,
      cell: (s) => html`<${Line} text=${s.values[n]} limit=${200} />` })),
  ]} />` : html`<p class="empty">None: all have the same settings.</p>`}</${Card}>`;
}

function Finals({ final, names }) {
  const metrics = [...new Set(final.flatMap((one) => Object.keys(one.metrics ?? {})))].toSorted();
  return html`<${Card} title="Last step"><${Table} label="Metrics of the last step" limit=${40}
    rows=${metrics.map((metric) => ({ metric }))} columns=${[
    { key: "metric", label: "metric" },
    ...names.map((name, n) => ({ key: `v${n}`, kind: "n", label: html`<${Line} text=${name}
      limit=${40} />`, cell: (r) => number(final[n]?.metrics?.[r.metric], 4) })),
  ]} /></${Card}>`;
}

function CompareStep({ step, runs, names }) {
  const state = useApi(`compare/steps/${encodeURIComponent(step)}`, { runs: runs.join(",") }, {
    run: runs[0] });
  const to = (other) => link("compare", ["steps", other], { runs: runs.join(",") });
  return html`<${Crumbs} parts=${[["Compare", link("compare", [], { runs: runs.join(",") })],
    [`Step ${step}`]]} />
    <header class="page-head"><h1>Step ${count(step)} in ${count(runs.length)} runs</h1>
      <${Neighbours} what="step" previous=${step > 1 && to(Number(step) - 1)}
        next=${to(Number(step) + 1)} /></header>
    <${Loaded} state=${state}>${(data) => html`
      <p class="hint">${sameness(data.same_members,
        "The same trajectories", "Not the same trajectories")}; ${
        sameness(data.same_state, "the same bits afterwards", "other bits afterwards")}.</p>
      <div class="grid two"><${StepMetrics} data=${data} names=${names} /><${Settings}
        settings=${data.settings} names=${names} /></div>
      <${Members} data=${data} runs=${runs} names=${names} />`}</${Loaded}>`;
}

function sameness(value, yes, no) {
  return value === null || value === undefined ? "not known" : value ? yes : no;
}

function StepMetrics({ data, names }) {
  const value = (n, metric) =>
    data.runs[n]?.done?.metrics?.[metric] ?? data.runs[n]?.done?.[metric];
  return html`<${Card} title="Metrics"><${Table} label="Metrics of the step" limit=${40}
    rows=${data.metrics.map((metric) => ({ metric }))} columns=${[
    { key: "metric", label: "metric" },
    ...names.map((name, n) => ({ key: `v${n}`, kind: "n", label: html`<${Line} text=${name}
      limit=${40} />`, cell: (r) => number(value(n, r.metric), 5) })),
  ]} /></${Card}>`;
}

function Members({ data, runs, names }) {
  const most = Math.max(1e-9, ...data.trajectories.flatMap((t) =>
    t.advantage).filter(Number.isFinite).map(Math.abs));
  return html`<${Card} title="Advantages"
    note="of each trajectory that one of them trained in this step"><${Table}
    label="Advantages by trajectory"
    rows=${data.trajectories} limit=${100} href=${(t) =>
      trajectoryLink(runs[t.in.findIndex(Boolean)] ?? runs[0], t.trajectory, { by: "advantage" })}
      columns=${[
      { key: "trajectory", label: "trajectory", cell: (t) => html`<${Line}
        text=${t.trajectory} />` },
      ...names.flatMap((name, n) => [
        { key: `a${n}`, kind: "n", label: html`<${Line} text=${name} limit=${40} />`, cell: (t) =>
          t.in[n]
          ? html`<${Bar}
            share=${Math.abs(t.advantage[n] ?? 0) / most}>${fixed(t.advantage[n], 3)}</${Bar}>`
            : "not trained" },
        { key: `r${n}`, kind: "n", label: "reward", cell: (t) => fixed(t.reward[n]) }]),
    ]} /></${Card}>`;
}
