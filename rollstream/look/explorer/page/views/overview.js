// A run at a glance: where it stands, its curves, its rollouts, what ended how, and warnings. Other
// runs of the same command are drawn into the same curves (`?with=1,2`).

import { html } from "../vendor/preact.js";
import { get, runPath, useApi } from "../api.js";
import { Chart } from "../chart.js";
import { NONE, count, duration, fixed, moment, number, percent } from "../format.js";
import { Card, Loaded, Select, Table, Tiles, useLoaded } from "../parts.js";
import { adjust, go, link } from "../router.js";
import { Line } from "../text.js";

/** A chart: title, note, and its metrics as [name, words, is a bound]. */
const CHARTS = [
  ["Reward", "mean of a step's trajectories", [["reward_mean", "reward"]]],
  ["Response length", "generated tokens of a step's trajectories",
    [["length_median", "median"], ["length_p99", "99th percentile", true]]],
  ["Lag when trained", "steps between a token's version and the trainer's",
    [["lag_consumed_mean", "mean"], ["lag_consumed_max", "largest", true]]],
  ["Entropy", "of the policy, per token", [["entropy", "entropy"]]],
  ["Loss", "", [["loss", "loss"]]],
  ["Effective sample size", "share; low where trainer and rollouts disagree", [["ess", "ESS"]]],
  ["Seconds per step", "", [["seconds", "whole"], ["busy_s", "busy"], ["wait_s", "waiting", true]]],
  ["Gradient norm", "before clipping", [["gradient_norm", "norm"]]],
  ["Tokens trained", "in a step", [["tokens_trained", "tokens"]]],
];

export default function Overview({ run, query, listed }) {
  const state = useApi(runPath(run.run, "overview"), {}, { run: run.run });
  const others = (query.get("with") ?? "").split(",")
    .filter((one) => listed.runs.some((known) => known.run === one && one !== run.run));
  const compared = useLoaded((signal) => Promise.all(others.map((one) =>
    get(runPath(one, "overview"), {}, signal))), [others.join()]);
  return html`<header class="page-head"><div><h1><${Line} text=${run.name} /></h1>
      <p class="note">${headline(run)}</p></div>
      <${Others} run=${run} listed=${listed} chosen=${others} /></header>
    <${Loaded} state=${state}>${(data) => html`
      ${run.simulated && html`<${Simulated} />`}
      <${Now} data=${data} run=${run} />
      <${Warnings} warnings=${data.warnings} />
      <${Curves} run=${run} runs=${[data, ...(compared.data ?? [])]} extra=${query.get("metric")} />
      ${!run.simulated && html`<div class="grid two"><${Outcomes} data=${data} run=${run} />
        <${Rollouts} rollouts=${data.rollouts} now=${data.now} /></div>
      <${Tasks} tasks=${data.tasks} run=${run} />`}`}</${Loaded}>`;
}

function Simulated() {
  return html`<${Card} title="A simulated run"><p>Its steps and the time of its rollouts are those of
    a model of a cluster. It has no trajectories, groups, rewards, losses, weights or log, so the
    views of these are left out; Settings has its figures.</p></${Card}>`;
}

function headline(run) {
  const { settings = {} } = run;
  const [begin, end] = run.span ?? [];
  return html`${[run.phase, settings.loss, settings.on_update].filter(Boolean).map((word, n) =>
    html`${n ? " · " : ""}<${Line} text=${word} limit=${80} />`)}${settings.max_lag != null
    && ` · lag at most ${settings.max_lag}`}${begin > 0 && ` · ${moment(begin).slice(0, 16)} to ${
    moment(end).slice(moment(end).startsWith(moment(begin).slice(0, 10)) ? 11 : 0, 16)} UTC`}${run.paced && " · paced engine"}${run.simulated
    && ` · simulated, ${duration(end - begin)} of virtual time`}`;
}

function Others({ run, listed, chosen }) {
  const rest = listed.runs.filter((one) => one.run !== run.run);
  if (!rest.length) return null;
  const toggled = (one) => chosen.includes(one) ? chosen.filter((c) =>
    c !== one) : [...chosen, one];
  return html`<div class="actions" role="group" aria-label="Compare with">
    <span class="soft">with</span>${rest.slice(0, 7).map((one) => html`<button class="chip"
      aria-pressed=${chosen.includes(one.run)}
      onClick=${() => adjust({ with: toggled(one.run).join(",") })}>
      <i class=${`swatch line c${chosen.includes(one.run) ? 2 + chosen.indexOf(one.run) : 7}`}
        aria-hidden="true"></i><${Line} text=${one.name} limit=${40} /></button>`)}</div>`;
}

function Now({ data, run }) {
  const { now, outcomes, metrics, evaluations } = data;
  const last = (name) => fixed((metrics.values[name] ?? []).findLast((v) => v !== null));
  const greedy = evaluations.findLast((one) => Number.isFinite(one.accuracy_greedy));
  const slash = (a, b) => `${count(a)}\u202f/\u202f${count(b)}`;
  return html`<${Tiles} tiles=${[
    now.steps ? ["run.steps run.steps_wanted", slash(now.step, now.steps),
      link("r", [run.run, "steps"]), "", "steps"]
      : ["run.steps", count(now.step), link("r", [run.run, "steps"])],
    ["step.reward_mean", last("reward_mean"), "", "last", "mean reward, last step"],
    ["evaluation.accuracy_greedy", fixed(greedy?.accuracy_greedy), "", greedy?.step],
    ...(run.simulated ? [] : [["run.groups_trained run.groups_admitted",
      slash(outcomes.groups.trained, outcomes.groups.admitted), link("r", [run.run, "groups"]), "",
      "groups trained of admitted"]]),
    ["run.tokens_per_s", count(now.tokens_per_s)],
    ["run.generated_per_s", run.living || run.simulated ? count(now.generated_per_s) : NONE],
    ["run.lag_consumed_mean run.lag_consumed_max", now.lag_consumed_mean == null ? NONE
      : `${fixed(now.lag_consumed_mean)} · ${count(now.lag_consumed_max)}`, "", "",
      "mean and largest lag when trained"],
    ["run.restarts", count(now.restarts)],
    ["run.seconds", duration(now.seconds)],
  ].filter(([, value]) => value !== NONE)} />`; // an archive does not know its restarts
}

function Warnings({ warnings }) {
  if (!warnings?.length) return null;
  return html`<${Card} title="Warnings">${warnings.map((one) => html`<p>
    <span class="badge bad"><${Line} text=${one.name} /></span>
    ${" "}<${Line} text=${one.text} limit=${400} />${one.advice
      && html` <span class="soft"><${Line} text=${one.advice} limit=${400} /></span>`}</p>`)}
  </${Card}>`;
}

function Curves({ run, runs, extra }) {
  const known = runs[0].metrics.names;
  const drawn = new Set(CHARTS.flatMap(([, , names]) => names.map(([name]) => name)));
  const charts = extra && known.includes(extra)
    ? [...CHARTS, [extra, "", [[extra, extra]]]] : CHARTS;
  const open = (step) => go("r", [run.run, "steps", step]);
  return html`<div class="grid">
    <${Evaluations} runs=${runs} />
    ${charts.map(([title, note, names]) => {
      const series = curveSeries(runs, names);
      return series.length > 0 && html`<${Card} key=${title} title=${title} note=${note}
        figures=${names.map(([name]) => `step.${name}`).join(" ")}>
        <${Chart} title=${title} series=${series} group="steps" onPick=${open}
          zero=${title !== "Loss"} named=${runs.length > 1} /></${Card}>`;
    })}</div>
    <div class="form"><${Select} label="draw another metric" value=${extra ?? ""}
      options=${[["", "–"], ...known.filter((n) => !drawn.has(n)).map((n) => [n, n])]}
      onChange=${(metric) => adjust({ metric })} />
      <p class="note">A click on a curve opens the step; drag to zoom, double-click to see all.</p></div>`;
}

/** One run: all metrics of a chart. Several: the first metric of each run, in the run's colour. */
function curveSeries(runs, names) {
  const points = (data, name) => data.metrics.step.map((step, n) =>
    [step, data.metrics.values[name]?.[n] ?? null]).filter(([, y]) => y !== null);
  const series = runs.length > 1
    ? runs.map((data, n) => ({ name: data.run.name, colour: n + 1,
      points: points(data, names[0][0]) }))
    : names.map(([name, words, dash], n) => ({ name: words, colour: n + 1, dash,
        points: points(runs[0], name) }));
  return series.filter((one) => one.points.length);
}

function passes(evaluations) {
  const size = (name) => Number(name.replace("pass_at/", ""));
  return [...new Set(evaluations.flatMap(Object.keys))]
    .filter((name) => name.startsWith("pass_at/")).sort((a, b) => size(a) - size(b)).slice(-6);
}

function Evaluations({ runs }) {
  const line = (data, name) => data.evaluations.filter((e) => Number.isFinite(e[name]))
    .map((e) => [e.step, e[name]]);
  const series = (runs.length > 1
    ? runs.map((data, n) => ({ name: data.run.name, colour: n + 1,
      points: line(data, "accuracy_greedy") }))
    : [{ name: "sampled", colour: 1, points: line(runs[0], "accuracy_sampled") },
       { name: "greedy", colour: 2, points: line(runs[0], "accuracy_greedy") },
       ...passes(runs[0].evaluations).map((name, n) => ({ name: name.replace("pass_at/", "pass@"),
         colour: n + 3, points: line(runs[0], name) }))])
    .filter((one) => one.points.length);
  return series.length > 0 && html`<${Card} title="Held-out accuracy"
    figures="evaluation.accuracy_sampled evaluation.accuracy_greedy" note=${runs.length > 1
    ? "greedy answers, by version" : "by version"}>
    <${Chart} title="Held-out accuracy" series=${series} group="steps"
      named=${runs.length > 1} /></${Card}>`;
}

function Outcomes({ data, run }) {
  const { groups, trajectories } = data.outcomes;
  const of = groups.admitted || 1;
  const rows = ["trained", "filtered", "expired", "dead", "open"].map((name) =>
    ({ name, groups: groups[name] ?? 0 }));
  return html`<${Card} title="What became of the groups"
    note=${html`<span data-figure="run.groups_admitted">${count(groups.admitted)}</span> admitted; ${
      Object.entries(trajectories).map(([finish, n], at) => html`${at ? ", " : ""}<span
        data-figure=${`run.trajectories_${finish}`}>${count(n)}</span> ${finish}`)} among
      the trajectories`}>
    <${Table} label="Groups by ending" rows=${rows} columns=${[
      { key: "name", label: "ended" },
      { key: "groups", label: "groups", kind: "n", cell: (r) => html`<span
        data-figure=${`run.groups_${r.name}`}>${count(r.groups)}</span>` },
      { key: "share", label: "share", kind: "n", cell: (r) => percent(r.groups / of, 1) },
    ]} href=${(row) => link("r", [run.run, "groups"], { ended: row.name })} />
    ${data.reasons?.length > 0 && html`<h3>Reasons</h3>${data.reasons.slice(0, 12).map((one) =>
      html`<p><span class="badge">${count(one.count)}</span> <${Line} text=${one.what}
        limit=${200} /></p>`)}`}
  </${Card}>`;
}

function Rollouts({ rollouts, now }) {
  return html`<${Card} title="Rollouts" note=${html`newest version <span
    data-figure="run.version">${count(now.version)}</span>`}>
    ${rollouts?.length ? html`<${Table} label="Rollouts" rows=${rollouts} limit=${64} columns=${[
      { key: "rollout", label: "rollout", kind: "keep", cell: (r) => html`<${Line} text=${r.rollout}
        limit=${28} />` },
      { key: "health", label: "state", cell: (r) => r.health ?? "–" },
      { key: "running", label: "running", kind: "n", figure: "rollout.running rollout.slots",
        cell: (r) => r.slots ? `${count(r.running)} of ${count(r.slots)}` : count(r.running) },
      { key: "version", label: "version", kind: "n", figure: "rollout.version",
        cell: (r) => r.version == null ? "–" : `v${r.version}` },
      { key: "tokens_per_s", label: "tokens/s now", kind: "n", figure: "rollout.tokens_per_s",
        cell: (r) => count(r.tokens_per_s) },
      { key: "trajectories", label: "trajectories", kind: "n", figure: "rollout.trajectories",
        cell: (r) => count(r.trajectories) },
      { key: "tokens", label: "tokens", kind: "n", figure: "rollout.tokens",
        cell: (r) => count(r.tokens) },
    ]} />` : html`<p class="empty">No rollout has reported.</p>`}</${Card}>`;
}

function Tasks({ tasks, run }) {
  if (!(tasks?.length > 1)) return null;
  return html`<${Card} title="Tasks"><${Table} label="Tasks" rows=${tasks} limit=${50} columns=${[
    { key: "task", label: "task", cell: (t) => html`<${Line} text=${t.task} />` },
    { key: "trajectories", label: "trajectories", kind: "n", figure: "task.trajectories",
      cell: (t) => count(t.trajectories) },
    { key: "reward_mean", label: "mean reward of all", kind: "n", figure: "task.reward_mean",
      cell: (t) => fixed(t.reward_mean) },
    { key: "tokens_mean", label: "mean tokens", kind: "n", figure: "task.tokens_mean",
      cell: (t) => number(t.tokens_mean) },
  ]} href=${(task) => link("r", [run.run, "search"], { task: task.task })} /></${Card}>`;
}
