// Versions of the weights: which were published when and how large, who holds which, how long the
// rollouts took to serve them, and by which relay the bytes came.

import { html } from "../vendor/preact.js";
import { runPath, useApi } from "../api.js";
import { bytes, count, duration, moment } from "../format.js";
import { Card, Loaded, Table, Tiles } from "../parts.js";
import { Line } from "../text.js";
import { tree } from "../tree.js";
import { stepLink } from "./rows.js";

export default function Weights({ run }) {
  const state = useApi(runPath(run.run, "weights"), {}, { run: run.run });
  return html`<header class="page-head"><div><h1>Weights</h1>
      <p class="note">A version is immutable; a delta is stored as its difference from its parent.</p></div></header>
    <${Loaded} state=${state}>${(data) => html`
      ${data.note && html`<p class="hint"><${Line} text=${data.note} limit=${400} /></p>`}
      <${Sizes} data=${data} />
      <div class="grid two"><${Delays} delays=${data.delays} /><${Holders}
        holders=${data.holders} latest=${data.latest} /></div>
      ${data.relays.length > 0 && html`<${Relays} relays=${data.relays} />`}
      ${data.versions.length > 0 && html`<${Versions} run=${run}
        versions=${data.versions} />`}
      ${data.streams?.length > 0 && html`<${Streams} streams=${data.streams} />`}`}</${Loaded}>`;
}

function Sizes({ data }) {
  const kinds = (kind) => data.versions.filter((v) => v.kind === kind);
  const mean = (list) => list.length ? list.reduce((sum, v) =>
    sum + (v.bytes ?? 0), 0) / list.length : null;
  const [anchors, deltas] = [kinds("anchor"), kinds("delta")];
  return html`<${Tiles} tiles=${[
    ["newest version", data.latest == null ? "–" : `v${data.latest}`],
    ["versions listed", count(data.versions.length)],
    ["full versions, mean size", `${count(anchors.length)} · ${bytes(mean(anchors))}`],
    ["deltas, mean size", `${count(deltas.length)} · ${bytes(mean(deltas))}`],
    ["times that a rollout took weights", count(data.applied.length)],
  ]} />`;
}

/** Seconds from the end of the step that made a version to each rollout that served it. */
function Delays({ delays }) {
  const rows = delays?.rollouts ?? [];
  if (!rows.length) return html`<${Card} title="How late rollouts took them"><p
    class="empty">Not known: the versions' times are gone from the log.</p></${Card}>`;
  return html`<${Card} title="How late rollouts took them"
    note="seconds from a step's end to its weights in the engine">
    ${tree(delays.chart)}
    <${Table} label="Seconds behind, by rollout" rows=${rows} limit=${16} columns=${[
      { key: "rollout", label: "rollout", cell: (r) => html`<${Line} text=${r.rollout}
        limit=${40} />` },
      { key: "versions", label: "versions", kind: "n", cell: (r) => count(r.versions) },
      { key: "mean", label: "mean", kind: "n", cell: (r) => duration(r.mean) },
      { key: "worst", label: "worst", kind: "n", cell: (r) => duration(r.worst) }]} /></${Card}>`;
}

function Holders({ holders, latest }) {
  return html`<${Card} title="Who holds what">${holders.length ? html`<${Table}
    label="Holders of versions" rows=${holders} limit=${32} columns=${[
    { key: "name", label: "name", cell: (h) => html`<${Line} text=${h.name} limit=${60} /> <span
      class="soft">${h.kind === "relay" ? "relay" : ""}</span>` },
    { key: "version", label: "version", kind: "n", cell: (h) => h.version == null ? "–"
      : `v${h.version}` },
    { key: "behind", label: "behind", kind: "n", cell: (h) => h.version == null || latest == null
      ? "–" : count(latest - h.version) },
    { key: "checked", label: "checked by", cell: (h) => h.verified === false ? html`<span
      class="badge bad">not verified</span>` : (h.checked ?? "").replace("_", " ") || "–" },
    { key: "versions", label: "holds", cell: (h) => held(h.versions) },
    { key: "seconds", label: "took", kind: "n", cell: (h) => duration(h.seconds) },
  ]} />` : html`<p class="empty">No holder has reported.</p>`}</${Card}>`;
}

function held(versions) {
  if (!versions?.length) return "–";
  const shown = versions.slice(-6).map((v) => `v${v}`).join(", ");
  return versions.length > 6 ? `${count(versions.length)}: … ${shown}` : shown;
}

/** The relay chain as a tree: each below the one that it reads from. */
function Relays({ relays }) {
  const under = (upstream) => relays.filter((one) => one.upstream === upstream);
  const branch = (one, path) => html`<li><${Line} text=${one.relay} />${!path.includes(one.relay)
    && under(one.relay).length > 0
    && html`<ul>${under(one.relay).map((next) => branch(next, [...path, one.relay]))}</ul>`}</li>`;
  return html`<${Card} title="Relays" note="each reads from the one above it">
    <ul class="tree"><li>store<ul>${under("").map((one) => branch(one,
      []))}</ul></li></ul></${Card}>`;
}

function Versions({ run, versions }) {
  const most = Math.max(1, ...versions.map((v) => v.bytes ?? 0));
  return html`<${Card} title="Versions" note="newest first"><${Table} label="Versions"
    rows=${versions} limit=${60}
    href=${(v) => stepLink(run.run, v.version)} columns=${[
      { key: "version", label: "version", kind: "n", cell: (v) => `v${v.version}` },
      { key: "term", label: "term", kind: "n", cell: (v) => count(v.term) },
      { key: "kind", label: "kind", cell: (v) => html`<span
        class="badge">${v.kind ?? "–"}</span>` },
      { key: "parent", label: "from", cell: (v) => html`<span
        class="hash">${v.parent ?? ""}</span>` },
      { key: "bytes", label: "size", kind: "n", cell: (v) => bytes(v.bytes),
        title: `largest ${bytes(most)}` },
      { key: "tensors", label: "tensors", kind: "n", cell: (v) => count(v.tensors) },
      { key: "announced_s", label: "announced (UTC)", kind: "n", cell: (v) =>
        moment(v.announced_s ?? v.done_s) },
      { key: "holders", label: "held by", cell: (v) => html`<${Line}
        text=${v.holders.slice(0, 6).join(", ")} limit=${120} />` }]} /></${Card}>`;
}

/** Versions of other models than the policy, each stream under its name. */
function Streams({ streams }) {
  return html`<${Card} title="Named weight streams"><${Table} label="Named weight streams"
    rows=${streams} limit=${60} columns=${[
      { key: "name", label: "stream", cell: (s) => html`<${Line} text=${s.name} limit=${64} />` },
      { key: "latest", label: "newest version", kind: "n", cell: (s) => s.latest == null ? "–"
        : `v${s.latest}` },
      { key: "versions", label: "versions kept", kind: "n", cell: (s) => count(s.versions) },
    ]} /></${Card}>`;
}
