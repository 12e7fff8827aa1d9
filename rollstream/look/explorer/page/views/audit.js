// The audit's verdict: each invariant, whether the run keeps it, and a link to each record that
// does not. The server runs the audit when this view is first opened.

import { html, useEffect, useState } from "../vendor/preact.js";
import { get, runPath, useApi } from "../api.js";
import { count, duration, moment, plural } from "../format.js";
import { Card, Failure, Loaded } from "../parts.js";
import { Line } from "../text.js";
import { recordLink } from "./rows.js";

const AGAIN_MS = 1500; // between questions while the audit reads

export default function Audit({ run }) {
  const [turn, setTurn] = useState(0);
  const state = useApi(runPath(run.run, "audit"), {}, { run: run.run });
  const [later, setLater] = useState(null);
  const data = later ?? state.data;
  useEffect(() => {
    if (data?.state !== "running") return undefined;
    const timer = setTimeout(() => get(runPath(run.run, "audit")).then((next) =>
      { setLater(next); setTurn(turn + 1); }, () => setTurn(turn + 1)), AGAIN_MS);
    return () => clearTimeout(timer);
  }, [data, turn]);
  return html`<header class="page-head"><div><h1>Audit</h1>
      <p class="note">Was anything lost, trained twice, or trained against the rules?</p></div></header>
    <${Loaded} state=${{ ...state, data }}>${(found) => html`<${Verdict} run=${run}
      data=${found} />`}</${Loaded}>`;
}

function Verdict({ run, data }) {
  if (data.state === "failed") return html`<${Failure} error=${new Error(data.message)} />`;
  if (data.state === "running") return html`<p class="loading" role="status"><span class="spinner"
    aria-hidden="true"></span>
    The audit reads <${Line} text=${data.reading ?? "the run"} />…</p>`;
  return html`<${Card} kind=${data.violations ? "verdict bad" : "verdict"}><p
    class="verdict-line">${data.violations
      ? html`<span class="badge bad">✕</span> ${plural(data.violations, "violation")}`
      : html`<span class="badge good">✓</span> No violation${data.checked_whole ? ""
        : " in what is still kept"}`}</p>
      <p class="note">${duration(data.seconds)}, ${moment(data.at_s)} UTC · ${Object.entries(data.topics ?? {}).map(([topic, how]) => `${topic}: ${how}`).join(", ")}</p></${Card}>
    ${data.invariants.map((one) => html`<${Invariant} key=${one.invariant} run=${run}
      one=${one} />`)}`;
}

const SIGNS = { kept: ["✓", "good"], violated: ["✕", "bad"], unchecked: ["–", ""] };

function Invariant({ run, one }) {
  const [sign, kind] = SIGNS[one.state] ?? ["?", ""];
  return html`<${Card} title=${`${one.invariant}. ${one.title}`} actions=${html`<span
    class=${`badge ${kind}`}>${sign} ${one.state}</span>`}>
    ${Object.keys(one.counts ?? {}).length > 0 && html`<p
      class="note">${Object.entries(one.counts).map(([name, n]) =>
      `${name.replaceAll("_", " ")} ${typeof n === "number" ? count(n) : n}`).join(" · ")}</p>`}
    ${one.offenders.length > 0 && html`<ul
      class="offenders">${one.offenders.slice(0, 100).map((o) => html`<li><${Offender} run=${run}
      one=${o} /></li>`)}</ul>
      ${one.violations > one.offenders.length && html`<p
        class="note">${count(one.violations - one.offenders.length)} more are counted, not listed</p>`}`}
    ${[...(one.unchecked ?? []), ...(one.notes ?? [])].map((note) => html`<p class="soft"><${Line}
      text=${note} limit=${500} /></p>`)}</${Card}>`;
}

function Offender({ run, one }) {
  const what = html`<${Line} text=${one.what} limit=${400} />`;
  if (one.offset === undefined || one.offset === null) return html`${what} <span class="hash">
    <${Line} text=${one.key ?? ""} limit=${200} /></span>`;
  return html`<a class="row-link"
    href=${recordLink(run.run, one.topic, one)}>${one.topic} ${one.partition}:${one.offset}</a> ${what}`;
}
