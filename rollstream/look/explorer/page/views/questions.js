// The questions that people ask of a run, each with its answer: those of the page "Query the log",
// computed by the same queries. A bar leads to the trajectories or groups that it counts.

import { html } from "../vendor/preact.js";
import { runPath, useApi } from "../api.js";
import { count, duration, fixed, number } from "../format.js";
import { Bars, Card, Loaded, Table } from "../parts.js";
import { link } from "../router.js";
import { Line } from "../text.js";
import { groupLink } from "./rows.js";

export default function Questions({ run }) {
  const state = useApi(runPath(run.run, "questions"), {}, { run: run.run });
  const search = (query) => link("r", [run.run, "search"], query);
  return html`<header class="page-head"><div><h1>Questions</h1>
      <p class="note">What people ask of a run; a bar opens what it counts.</p></div></header>
    <${Loaded} state=${state}>${(data) => html`<div class="grid">
      <${Answer} title="Does working at length pay?" note="mean reward by generated tokens"
        of=${data.lengths}>${(rows) =>
        html`<${Bars} label="Reward by length" most=${Math.max(1, ...rows.map((r) =>
          r.reward ?? 0))} rows=${rows.map((r) =>
          [`${count(r.from_tokens)} to ${count(r.to_tokens)}`, r.reward, `${fixed(r.reward)} · ${count(r.answers)} answers`,
            search({ tokens_min: r.from_tokens, tokens_max: r.to_tokens - 1 })])} />`}</${Answer}>
      <${Answer} title="How stale was what was trained?" note="trained tokens by their lag"
        of=${data.lags}>${(rows) =>
        html`<${Bars} label="Trained tokens by lag" unit="tokens"
          rows=${rows.map((r) => [`lag ${r.lag}`, r.tokens])} />`}</${Answer}>
      <${Answer} title="What was thrown away, and why?" note="groups by their ending"
        of=${data.endings}>${(rows) =>
        html`<${Bars} label="Groups by ending" unit="groups"
          rows=${rows.map((r) => [`${r.ended}${r.detail ? `: ${r.detail}`
          : ""}`, r.groups, undefined,
          link("r", [run.run, "groups"], { ended: r.ended })])} />`}</${Answer}>
      <${Answer} title="How often does a prompt teach something?"
        note="prompts by how many answers were right; all or none is no lesson"
        of=${data.solved}>${(rows) =>
        html`<${Bars} label="Prompts by right answers" unit="prompts"
          rows=${rows.map((r) => [r.of === undefined
          ? `${fixed(r.mean_from, 1)} to ${fixed(r.mean_to, 1)}`
            : `${r.right} of ${r.of}`, r.prompts, undefined, search(meanOf(r))])} />`}</${Answer}>
      <${Answer} title="How long from an answer to its training?" note=${data.waits
        && `median ${duration(data.waits.median_s)}, 90 % ${duration(data.waits.p90_s)}, longest ${duration(data.waits.longest_s)}`}
        of=${data.waits?.bins}>${(rows) => html`<${Bars} label="Trajectories by waiting time"
          rows=${rows.map((r) =>
          [`${number(r.from_s)} to ${number(r.to_s)} s`, r.trajectories])} />`}</${Answer}>
      <${Answer} title="Is the policy surer when it is right?"
        note="log-probability of the tokens that it drew" of=${data.sureness}>${(rows) =>
        html`<${Table} label="Log-probability of right and wrong answers" rows=${rows} columns=${[
          { key: "right", label: "answer", cell: (r) => (r.right ? "right" : "wrong") },
          { key: "answers", label: "answers", kind: "n", cell: (r) => count(r.answers) },
          { key: "logprob", label: "mean", kind: "n", cell: (r) => fixed(r.logprob, 4) },
          { key: "least_sure", label: "least sure token", kind: "n", cell: (r) =>
            fixed(r.least_sure, 3) }]} />`}</${Answer}>
      <${Answer} title="Which rollout was slow?"
        note="by what it generated, and by how soon it served a new version"
        of=${data.pickup}>${(rows) =>
        html`<${Table} label="Speed of the rollouts" rows=${rows} limit=${16} columns=${[
          { key: "rollout", label: "rollout", kind: "keep", cell: (r) => html`<${Line}
            text=${r.rollout} limit=${28} />` },
          { key: "trajectories", label: "answers", kind: "n", figure: "rollout.answers",
            cell: (r) => count(r.trajectories) },
          { key: "tokens", label: "tokens of answers", kind: "n", figure: "rollout.answer_tokens",
            cell: (r) => count(r.tokens) },
          { key: "ms_per_token", label: "ms/token", kind: "n", figure: "rollout.ms_per_token",
            cell: (r) => number(r.ms_per_token) },
          { key: "longest_s", label: "longest", kind: "n", figure: "rollout.longest_s",
            cell: (r) => duration(r.longest_s) },
          { key: "behind_s", label: "behind", kind: "n", figure: "rollout.behind_s",
            cell: (r) => duration(r.behind_s) }]} />`}</${Answer}>
      <${Answer} title="Which prompts are never solved?" note="all answers wrong, the longest first"
        of=${data.unsolved}>${(rows) =>
        html`<${Table} label="Prompts that are never solved" rows=${rows} limit=${8} href=${(r) =>
          groupLink(run.run, r.group)} columns=${[
          { key: "group", label: "group", cell: (r) => String(r.group) },
          { key: "prompt", label: "prompt", cell: (r) => html`<${Line} text=${r.prompt}
            limit=${120} />` },
          { key: "answers", label: "answers", kind: "n", cell: (r) => count(r.answers) },
          { key: "tokens", label: "tokens", kind: "n", cell: (r) => number(r.tokens) },
          { key: "cut", label: "cut", kind: "n", cell: (r) => count(r.cut) }]} />`}</${Answer}>
      <${Answer} title="How does it answer at the end, and how at the beginning?"
        note="scores that the task records, by the version that began the answer"
        of=${data.scores}>${(rows) =>
        html`<${Scores} rows=${rows} />`}</${Answer}>
    </div>
    <p class="hint">How did reward and accuracy move? <a href=${link("r",
      [run.run, "overview"])}>The overview</a> has the curves, <a href=${link("r",
      [run.run, "weights"])}>weights</a> how soon each version was served.
      One trajectory from its beginning to its end: <a
        href=${search({})}>search</a> and open one. Single records: <a href=${link("r",
        [run.run, "steps"])}>a step</a> links to each.</p>`}</${Loaded}>`;
}

/** The search filters of a bar of `solved`. */
function meanOf(row) {
  const [low, high] = row.of === undefined ? [row.mean_from, row.mean_to] : [row.right / row.of, row.right / row.of];
  return { group_reward_min: (low - 1e-6).toFixed(6), group_reward_max: (high + 1e-6).toFixed(6) };
}

function Answer({ title, note, of, children }) {
  return html`<${Card} title=${title} note=${note}>${of?.length ? children(of)
    : html`<p class="empty">${of ? "Nothing to count."
      : "This run's records do not show it."}</p>`}</${Card}>`;
}

/** One row per score, one column per band of versions: share of its answers and their reward. */
function Scores({ rows }) {
  const bands = [...new Set(rows.map((r) => r.from_version))].toSorted((a, b) => a - b);
  const names = [...new Set(rows.map((r) => r.name))];
  const total = new Map(bands.map((band) => [band, rows.filter((r) =>
    r.from_version === band).reduce((sum, r) => sum + r.answers, 0)]));
  const at = (name, band) => rows.find((r) => r.name === name && r.from_version === band);
  return html`<${Table} label="Scores by version" rows=${names} limit=${24} columns=${[
    { key: "name", label: "score", cell: (name) => html`<${Line} text=${name} limit=${60} />` },
    ...bands.map((band) => ({ key: `b${band}`, label: `from v${band}`, kind: "n", cell: (name) => {
      const found = at(name, band);
      return found && html`<span
        title=${`${count(found.answers)} answers`}>${Math.round((100 * found.answers) / total.get(band))} %${" "}
        <span class="soft">${fixed(found.reward)}</span></span>`;
    } }))]} /><p class="note">share of the answers, and their mean reward</p>`;
}
