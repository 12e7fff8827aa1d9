// Steps, newest first, and one step: what it trained (takes and their members), which groups, what
// was dropped or left out and why, the lag of its tokens, and its hashes.

import { html, useState } from "../vendor/preact.js";
import { get, runPath, useApi } from "../api.js";
import { NONE, count, duration, fixed, moment, number } from "../format.js";
import { Neighbours } from "../keys.js";
import { Bars, Card, Crumbs, Facts, Failure, Loaded, Table, Tiles } from "../parts.js";
import { link } from "../router.js";
import { Line } from "../text.js";
import { GROUP_COLUMNS, TrajectoryTable, groupLink, recordLink, stepLink, trajectoryLink } from "./rows.js";

export default function Steps({ run, rest, listed }) {
  return rest.length ? html`<${Step} run=${run} step=${rest[0]} listed=${listed} />`
    : html`<${StepList} run=${run} />`;
}

function StepList({ run }) {
  const state = useApi(runPath(run.run, "steps"), {}, { run: run.run });
  return html`<header class="page-head"><div><h1>Steps</h1>
    <p class="note">A step is one version of the weights: its takes, their groups, and their hashes.</p></div></header>
    <${Loaded} state=${state} isEmpty=${(data) => !data.steps.length}
      empty="No step is done yet.">${(data) =>
      html`<${Pages} run=${run} first=${data} />`}</${Loaded}>`;
}

/** The newest page, kept up to date, and older pages that the reader asked for. */
function Pages({ run, first }) {
  const [older, setOlder] = useState({ steps: [], next: undefined });
  const [error, setError] = useState(null);
  const oldest = older.steps.at(-1)?.step ?? Infinity;
  const fresh = first.steps.filter((one) => one.step < oldest || !older.steps.some((o) =>
    o.step === one.step));
  const steps = [...fresh, ...older.steps].toSorted((a, b) => b.step - a.step);
  const next = older.next === undefined ? first.next : older.next;
  const more = () => get(runPath(run.run, "steps"), { cursor: next }).then(
    (page) => setOlder({ steps: [...older.steps, ...page.steps], next: page.next }), setError);
  return html`<${Card} kind="flat"><${Table} label="Steps" rows=${steps} href=${(s) =>
    stepLink(run.run, s.step)} columns=${[
    { key: "step", label: "step", kind: "n", cell: (s) => count(s.step) },
    { key: "reward_mean", label: "reward", kind: "n", figure: "step.reward_mean", cell: (s) => fixed(s.reward_mean) },
    { key: "loss", label: "loss", kind: "n", figure: "step.loss", cell: (s) => fixed(s.loss, 4) },
    { key: "entropy", label: "entropy", kind: "n", figure: "step.entropy", cell: (s) => fixed(s.entropy, 3) },
    { key: "ess", label: "ESS", kind: "n", figure: "step.ess", cell: (s) => fixed(s.ess, 3) },
    { key: "lag_consumed_mean", label: "lag when trained", kind: "n",
      figure: "step.lag_consumed_mean step.lag_consumed_max",
      cell: (s) => `${fixed(s.lag_consumed_mean)} · ${count(s.lag_consumed_max)}` },
    { key: "length_median", label: "length", kind: "n", figure: "step.length_median",
      cell: (s) => count(s.length_median) },
    { key: "groups", label: "groups", kind: "n", figure: "step.groups", cell: (s) => count(s.groups) },
    { key: "trajectories", label: "trajectories", kind: "n", figure: "step.trained", cell: (s) => count(s.trajectories) },
    { key: "tokens_trained", label: "tokens", kind: "n", figure: "step.tokens_trained", cell: (s) => count(s.tokens_trained) },
    { key: "takes", label: "takes", kind: "n", figure: "step.takes", cell: (s) => count(s.takes) },
    { key: "seconds", label: "took", kind: "n", figure: "step.seconds", cell: (s) => duration(s.seconds) },
    { key: "hash", label: "state", cell: (s) => html`<span class="hash">${(s.state_hash
      || s.weights_hash || "").slice(0, 10)}</span>` },
  ]} />${next && html`<button class="more" onClick=${more}>older steps</button>`}
    ${error && html`<${Failure} error=${error} />`}</${Card}>`;
}

function Step({ run, step, listed }) {
  const state = useApi(runPath(run.run, "steps", step), {}, { run: run.run,
    still: Number(step) < run.step });
  return html`<${Crumbs} parts=${[["Steps", link("r", [run.run, "steps"])], [`Step ${step}`]]} />
    <${Loaded} state=${state}>${(data) => html`
      <header class="page-head"><h1>Step ${count(data.step.step)}</h1><div class="actions">
        <${Neighbours} what="step" previous=${data.previous != null
          && stepLink(run.run, data.previous)}
          next=${data.next != null && stepLink(run.run, data.next)} />
        ${listed.runs.length > 1 && html`<a class="chip" href=${link("compare", ["steps", step],
          { runs: listed.runs.map((one) =>
            one.run).slice(0, 4).join(",") })}>compare runs</a>`}</div></header>
      <${StepFigures} step=${data.step} />
      ${run.simulated ? html`<${Lags} lags=${data.lags} />` : html`
        <div class="grid two"><${Groups} run=${run} groups=${data.groups} />
          <div><${Lags} lags=${data.lags} /><${Repeats} repeats=${data.repeats} /></div></div>
        <${NotTrained} run=${run} data=${data} />
        <${Takes} run=${run} takes=${data.takes} cut=${data.cut} />`}
      <${AllFigures} step=${data.step} />`}</${Loaded}>`;
}

function StepFigures({ step }) {
  const lag = `${fixed(step.lag_consumed_mean)} · ${count(step.lag_consumed_max)}`;
  return html`<${Tiles} tiles=${[
    ["step.reward_mean", fixed(step.reward_mean)],
    ["step.trained", count(step.trajectories)],
    ["step.groups", count(step.groups)],
    ["step.tokens_trained", count(step.tokens_trained)],
    ["step.ess", fixed(step.ess, 3)],
    ["step.lag_consumed_mean step.lag_consumed_max", lag, "mean and largest lag when trained"],
    ["step.entropy", fixed(step.entropy, 3)],
    ["step.seconds", duration(step.seconds)],
  ].filter(([, value]) => value !== NONE).map(([name, value, label]) =>
    [name, value, "", step.step, label])} />`;
}

function Groups({ run, groups }) {
  const columns = GROUP_COLUMNS(run.run).filter((c) =>
    ["group", "task", "reward_mean", "reward_std", "tokens_mean", "finished"].includes(c.key));
  return html`<${Card} title="Groups" note="each side by side on a click"><${Table}
    label="Groups of the step"
    rows=${groups} columns=${columns} href=${(g) => groupLink(run.run, g.group)}
      limit=${100} /></${Card}>`;
}

/** Tokens by their lag when trained, as bars. */
export function Lags({ lags, note = "tokens by how many steps behind they were when trained" }) {
  return html`<${Card} title="Lag" note=${note}><${Bars} label="Tokens by lag" unit="tokens"
    rows=${(lags ?? []).map((one) => [String(one.lag), one.tokens])} /></${Card}>`;
}

function Repeats({ repeats }) {
  const hashes = new Set(repeats.map((one) => one.state_hash));
  return html`<${Card} title="State" note=${repeats.length > 1
    ? `done ${repeats.length} times after crashes, ${hashes.size === 1 ? "each time the same bits"
      : "not the same bits each time"}`
    : "hash of weights and optimiser after the step"}>
    ${repeats.map((one) => html`<p class="hash">term ${one.term} · ${one.state_hash
      || "no hash"} · ${moment(one.done_s)}</p>`)}
  </${Card}>`;
}

function NotTrained({ run, data }) {
  if (!data.dropped.length && !data.left_out.length) return null;
  return html`<${Card} title="Dropped"
    note="groups that were closed without training, and members that no take trains">
    ${data.dropped.length > 0 && html`<${Table} label="Dropped groups" rows=${data.dropped}
      limit=${100} columns=${[
      { key: "group", label: "group", cell: (d) => String(d.group) },
      { key: "reason", label: "ended", cell: (d) => html`<span class="badge">${d.reason}</span>` },
      { key: "detail", label: "why", cell: (d) => html`<${Line} text=${d.detail} limit=${300} />` },
      { key: "at", label: "record", cell: (d) => html`<a href=${recordLink(run.run,
        "ledger", d.at)}>ledger ${d.at.partition}:${d.at.offset}</a>` },
    ]} href=${(d) => groupLink(run.run, d.group)} />`}
    ${data.left_out.length > 0 && html`<h3>Left out of trained groups</h3><${Table}
      label="Members left out" rows=${data.left_out} limit=${100} columns=${[
      { key: "trajectory", label: "trajectory", cell: (d) => html`<${Line}
        text=${d.trajectory} />` },
      { key: "why", label: "why", cell: (d) => html`<${Line} text=${d.why} limit=${300} />` },
    ]} href=${(d) => trajectoryLink(run.run, d.trajectory)} />`}</${Card}>`;
}

function Takes({ run, takes, cut }) {
  return html`<h2 class="section">Takes</h2>${cut && html`<p
    class="hint">Only the first members are listed.</p>`}
    ${takes.map((take) => html`<${Take} key=${`${take.term}/${take.update}/${take.micro_batch}`}
      run=${run} take=${take} />`)}`;
}

function Take({ run, take }) {
  const rows = take.members.map((m) => m.row ? { ...m.row, hash: m.hash } : { ...m, tokens: null,
    reward: null, step: null });
  return html`<${Card} title=${`Micro-batch ${take.micro_batch}${take.update
    ? ` of update ${take.update}` : ""}`}
    note=${html`${count(take.trajectories)} trajectories · term ${take.term} · ${moment(take.taken_s)} UTC · <a
      href=${recordLink(run.run, "ledger", take)}>ledger ${take.partition}:${take.offset}</a>`}
    actions=${take.superseded && html`<span class="badge bad">superseded</span>`}>
    <${TrajectoryTable} run=${run.run} rows=${rows} without=${["step", "task", "seconds"]}
      label=${`Members of micro-batch ${take.micro_batch}`}
      more=${[{ key: "hash", label: "hash", cell: (r) => html`<span
        class="hash">${String(r.hash ?? "").slice(0, 8)}</span>` }]} /></${Card}>`;
}

function AllFigures({ step }) {
  const entries = (values) => Object.entries(values ?? {}).map(([name, value]) =>
    [name, number(value, 4), `step.${name}`, step.step]);
  return html`<${Card} title="All figures"><${Facts} facts=${entries(step.metrics)} />
    ${Object.keys(step.counts ?? {}).length > 0 && html`<h3>Counts</h3><${Facts}
      facts=${entries(step.counts)} />`}</${Card}>`;
}
