// One trajectory token by token: coloured by a measure, with every number of the token under the
// pointer (or under the arrow keys), its turns with their waiting times, and the chain of records
// from its first order to the take that trained it.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { get, runPath, useApi } from "../api.js";
import { count, duration, fixed, moment, number, percent } from "../format.js";
import { Neighbours } from "../keys.js";
import { Card, Choice, Crumbs, Facts, Failure, Legend, Loaded } from "../parts.js";
import { adjust, link } from "../router.js";
import { legendSteps, measuresOf } from "../scales.js";
import { Block, Line, marked } from "../text.js";
import { tree } from "../tree.js";
import { Ended, Finish, groupLink, recordLink, stepLink, trajectoryLink } from "./rows.js";

const SHOWN = 4000; // tokens drawn at first and with each "show more"
const PIECE_MAX = 400; // characters of one token among the others
const SOURCES = ["prompt", "generated", "environment"];

export default function Trajectory({ run, rest, query }) {
  const state = useApi(runPath(run.run, "trajectories", rest[0]), {}, { run: run.run });
  return html`<${Loaded} state=${state}>${(data) =>
    html`<${Whole} run=${run} name=${rest[0]} data=${data} by=${query.get("by")} />`}</${Loaded}>`;
}

function Whole({ run, name, data, by }) {
  const { row, group, neighbours = {} } = data;
  const to = (other) => other && trajectoryLink(run.run, other, { by });
  return html`<${Crumbs} parts=${[["Groups", link("r", [run.run, "groups"])],
      ...(group ? [[`Group ${group.group}`, groupLink(run.run, group.group)]] : []),
        ["Trajectory"]]} />
    <header class="page-head"><div><h1>Trajectory <${Line} text=${name} /></h1>
      <p class="note"><${Finish} finish=${row?.finish} reason=${row?.reason} />
        ${row?.reason && html` <${Line} text=${row.reason} limit=${300} />`}
        ${row && html` reward <strong class="reward">${fixed(row.reward)}</strong>`}
        ${row?.step != null && html`, trained in <a
          href=${stepLink(run.run, row.step)}>step ${row.step}</a>`}
        ${row && row.step === null && group && html`, not trained: group <${Ended}
          group=${group} />`}</p></div>
      <${Neighbours} what="sample" previous=${to(neighbours.previous)}
        next=${to(neighbours.next)} /></header>
    <${Tokens} run=${run} name=${name} data=${data} by=${by} />
    <div class="grid two">
      <${Chain} run=${run} data=${data} />
      <div><${About} run=${run} data=${data} /><${Confidence} data=${data} /></div></div>`;
}

function Tokens({ run, name, data, by }) {
  const [more, setMore] = useState([]);
  const [error, setError] = useState(null);
  const [shown, setShown] = useState(SHOWN);
  const [at, setAt] = useState(null);
  const whole = useMemo(() => more.reduce(appended, data), [data, more]);
  const measures = useMemo(() => measuresOf(whole), [whole]);
  const measure = measures.find((m) => m.key === by) ?? measures[0];
  const loaded = whole.tokens.piece.length;
  const showMore = () => {
    if (shown >= loaded && loaded < data.total) {
      get(runPath(run.run, "trajectories", name), { from: loaded }).then((next) => {
        setMore([...more, next]);
        setShown(shown + SHOWN);
      }, setError);
    } else setShown(shown + SHOWN);
  };
  return html`<div class="tokens-page"><${Card} title="Tokens"
    note=${`${count(data.total)} tokens, ${count(data.prompt_tokens)} of them the prompt`}
      actions=${html`<${Choice} label="Colour tokens by" value=${measure.key} onChange=${(key) =>
        adjust({ by: key })}
        options=${measures.map((m) => [m.key, m.label])} />`}>
      <${Key} measure=${measure} />
      <${Turns} data=${whole} measure=${measure} shown=${Math.min(shown, loaded)} at=${at}
        onAt=${setAt} />
      ${Math.min(shown, loaded) < data.total && html`<button class="more" onClick=${showMore}>
        show more (${count(data.total - Math.min(shown, loaded))} tokens left)</button>`}
      ${error && html`<${Failure} error=${error} />`}
      ${data.missing && html`<p class="note">${data.missing.note}${data.missing.command
        && html` <code class="command">${data.missing.command}</code>`}</p>`}</${Card}>
    <${Inspector} data=${whole} at=${at} /></div>`;
}

/** Joins the next page of tokens to those that are there. */
function appended(data, next) {
  const joined = (a, b) => (a === null || b === null ? a ?? b : Array.isArray(a) ? [...a, ...b]
    : a);
  const tokens = Object.fromEntries(Object.keys(data.tokens).map((key) => [key, key === "strips"
    ? Object.fromEntries(Object.keys(data.tokens.strips ?? {}).map((strip) =>
        [strip, joined(data.tokens.strips[strip], next.tokens.strips?.[strip] ?? [])]))
    : joined(data.tokens[key], next.tokens[key])]));
  return { ...data, tokens };
}

function Key({ measure }) {
  if (measure.items) return html`<div class=${`ramp-${measure.ramp}`}><${Legend}
    items=${measure.items} /></div>`;
  return html`<div class=${`scale ramp-${measure.ramp}`}><span>${measure.scale[0]}</span>
    <span class="steps" aria-hidden="true">${legendSteps(measure).map((cls) => html`<i
      class=${cls}></i>`)}</span>
    <span>${measure.scale[1]}</span></div>`;
}

/** The turns; one pointer handler for all tokens, since there are thousands. */
function Turns({ data, measure, shown, at, onAt }) {
  const box = useRef(null);
  const over = (event) => {
    const token = event.target.closest?.("[data-n]");
    if (token) onAt(Number(token.dataset.n));
  };
  const press = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 }[event.key];
    if (!step) return;
    event.preventDefault();
    onAt(Math.max(0, Math.min(shown - 1, at === null ? 0 : at + step)));
  };
  useEffect(() => {
    box.current.querySelector(".t.at")?.classList.remove("at");
    const token = at === null ? null : box.current.querySelector(`[data-n="${at}"]`);
    token?.classList.add("at");
    if (box.current === document.activeElement) token?.scrollIntoView({ block: "nearest" });
  }, [at, shown]);
  const drawn = useMemo(() => data.turns.filter((turn) => turn.start < shown).map((turn, n) =>
    html`<${Turn} key=${turn.start} turn=${turn} number=${n} data=${data} measure=${measure}
      shown=${shown} />`),
    [data, measure, shown]);
  return html`<div ref=${box} tabindex="0" role="group" onMouseOver=${over} onClick=${over}
    onKeyDown=${press}
    aria-label="Tokens. Arrow keys walk over them; the numbers of the token are in Token.">${drawn}</div>`;
}

function Turn({ turn, data, measure, shown }) {
  const versions = turn.kind !== "generated" ? []
    : data.versions.filter((v) => v.start < turn.end && v.end > turn.start);
  return html`<section class=${`turn ${turn.kind} depth-${Math.min(turn.depth ?? 0, 6)}`}
    aria-label=${`${turn.kind}, ${turn.end - turn.start} tokens`}>
    <header><strong>${turn.kind}</strong><span>${count(turn.end - turn.start)} tokens</span>
      ${turn.kind === "generated"
        && html`<span>${versions.map((v) => `v${v.version}`).join(" → ")}</span>`}
      ${turn.seconds !== null && html`<span>${duration(turn.seconds)}</span>`}
      ${turn.wait_s !== null && html`<span>waited ${duration(turn.wait_s)}</span>`}
      ${turn.fork && html`<span class="fork">a branch (${turn.fork})</span>`}
      ${turn.abandoned && html`<span class="fork">abandoned, not trained</span>`}</header>
    <div class=${`tokens ramp-${measure.ramp}`}>${pieces(turn, data, measure, Math.min(turn.end, shown), versions)}</div>
  </section>`;
}

function pieces(turn, data, measure, end, versions) {
  const begins = new Map(versions.map((v) => [Math.max(v.start, turn.start), v]));
  const children = [];
  for (let n = turn.start; n < end; n += 1) {
    const begun = begins.get(n);
    if (begun && data.versions.length > 1) children.push(html`<span
      class="span-tag">v${begun.version}</span>`);
    const cls = turn.kind === "generated" ? measure.cls(n) : "";
    const masked = data.tokens.mask?.[n] === 0 ? " cutoff" : "";
    children.push(html`<span class=${`t ${cls}${masked}`}
      data-n=${n}>${shownPiece(data.tokens.piece[n])}</span>`);
  }
  return children;
}

/** A token's text: a line break has a sign, an empty piece too. */
function shownPiece(whole, limit = PIECE_MAX) {
  const piece = whole.length > limit ? whole.slice(0, limit) : whole;
  if (piece !== whole) {
    return [shownPiece(piece, limit), html`<span
      class="cut">… ${count(whole.length)} characters</span>`];
  }
  if (piece === "") return html`<span class="mark">∅</span>`;
  if (!piece.includes("\n")) return marked(piece);
  return piece.split("\n").flatMap((part, n) =>
    n ? [html`<span class="mark">⏎</span>`, "\n", ...marked(part)] : marked(part));
}

function Inspector({ data, at }) {
  const t = data.tokens;
  const value = (list) => (at === null || !list ? null : list[at]);
  const logprob = value(t.logprob);
  return html`<aside class="card inspector" aria-label="Token" aria-live="polite">
    <h2>Token${at !== null && ` ${count(at)}`}</h2>
    ${at === null ? html`<p
      class="soft">Point at a token, or focus the text and use the arrow keys.</p>`
      : html`<div class="piece"><bdi>${shownPiece(t.piece[at] ?? "", 2000)}</bdi></div>
      <dl>${[
        ["id", t.id[at]], ["from", SOURCES[t.source[at]]],
        ["version", value(t.version) !== null && `v${t.version[at]}`],
        ["lag", value(t.lag) !== null && count(t.lag[at])],
        ["log-probability", logprob !== null && fixed(logprob, 4)],
        ["probability", logprob !== null && percent(Math.exp(logprob), 2)],
        ["entropy", t.entropy && value(t.entropy) !== null && `${fixed(value(t.entropy), 4)} nats`],
        ["mismatch", t.mismatch && value(t.mismatch) !== null && number(value(t.mismatch), 3)],
        ["draft", t.accepted && value(t.accepted) !== null && (t.accepted[at] ? "accepted"
          : "sampled")],
        ["trained", t.mask && value(t.mask) !== null && (t.mask[at] ? "yes" : "masked")],
        ["advantage", logprob !== null && t.advantage != null && fixed(t.advantage, 3)],
        ...Object.entries(t.strips ?? {}).map(([name, list]) => [name.replaceAll("_", " "), value(list) !== null && fixed(value(list), 4)]),
      ].filter(([, v]) => v !== false && v !== null && v !== undefined).map(([k, v]) =>
        html`<dt>${k}</dt><dd>${v}</dd>`)}</dl>`}
  </aside>`;
}

const STATES = { start: "ordered", resume: "resumed", release: "released" };

function Chain({ run, data }) {
  return html`<${Card} title="What happened" note=${data.chain_complete
    ? "every record about it, in time"
    : "orders and partials were truncated from the log; what is left"}>
    <ol class="chain">${data.chain.map((one) => html`<li class=${one.kind}>
      ${one.wait_s !== null && html`<span class="wait">after ${duration(one.wait_s)}: </span>`}
      <${Event} run=${run} one=${one} />
      <span class="wait"> · ${moment(one.time_s).slice(11)}</span></li>`)}</ol></${Card}>`;
}

function Event({ run, one }) {
  const on = html`<${Line} text=${one.rollout} limit=${60} />`;
  const record = (topic, word) => one.at ? html`<a
    href=${recordLink(run.run, topic, one.at)}>${word}</a>` : word;
  switch (one.kind) {
    case "assignment": return html`${record("assignments", STATES[one.what] ?? one.what)} on ${on}, attempt ${one.attempt}${
      one.what !== "release" && one.version != null && ` under v${one.version}`}${one.from_token
        ? ` from token ${one.from_token}` : ""}`;
    case "partial": return html`${record("partials", `${count(one.tokens)} tokens`)} by ${on}, ${one.start} to ${one.end}${one.last ? ", then given up" : ""}`;
    case "completion": return html`${record("trajectories", "finished")} on ${on}: ${one.finish}`;
    case "take": return html`${record("ledger", "trained")} in <a
      href=${stepLink(run.run, one.step)}>step ${one.step}</a>, micro-batch ${one.micro_batch}`;
    default: return html`<${Line} text=${one.kind} />`;
  }
}

function About({ run, data }) {
  const { row, drafts } = data;
  return html`<${Card} title="About"><${Facts} facts=${[
      ["task", row && html`<${Line} text=${row.task} />`],
      ["rollout", row && html`<${Line} text=${row.rollout} />`],
      ["took", row && duration(row.finished_s - row.started_s)],
      ["finished (UTC)", row && moment(row.finished_s)],
      ["lag at finish", row && count(row.lag)],
      ["lag when trained", row?.lag_consumed != null && count(row.lag_consumed)],
      ["advantage", data.tokens.advantage != null && fixed(data.tokens.advantage, 3)],
      ["temperature", number(data.temperature)],
      ["moves", row && count(row.moves)],
      ["completions", data.completions > 1 && `${data.completions}; the first counts`],
      ["draft tokens", drafts && `${count(drafts.accepted)} of ${count(drafts.guessed)} accepted`],
      ["reference", data.reference && html`<${Line} text=${data.reference} limit=${300} />`],
      ...Object.entries(data.scores ?? {}).map(([name, v]) => [html`<${Line} text=${name}
        limit=${60} />`, number(v)]),
    ]} />
    ${data.annotations?.length > 0 && html`<h3>Annotations</h3>${data.annotations.map((one) =>
      html`<p>
      <${Line} text=${one.name} limit=${60} /> ${one.reason ? html`<${Line} text=${one.reason}
        limit=${200} />` : one.values > 1
        ? `${count(one.values)} values` : number(one.value)} <span class="soft">by <${Line}
          text=${one.scorer} limit=${60} /></span></p>`)}`}
    ${data.environment && html`<h3>Environment</h3><${Block} text=${data.environment}
      shown=${600} />`}</${Card}>`;
}

/** The probability of each generated token along the answer. */
function Confidence({ data }) {
  return data.confidence?.length > 0 && html`<${Card} title="Where it was unsure"
    note="log-probability of each token that it drew">${tree(data.confidence)}</${Card}>`;
}
