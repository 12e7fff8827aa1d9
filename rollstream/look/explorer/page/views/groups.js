// Groups, and one group: its prompt and all its answers side by side, with reward, advantage and
// what made each of them count or not.

import { html, useState } from "../vendor/preact.js";
import { get, isStatic, runPath, useApi } from "../api.js";
import { count, fixed, moment, number } from "../format.js";
import { Neighbours } from "../keys.js";
import { Card, Choice, Crumbs, Facts, Failure, Loaded, Table } from "../parts.js";
import { adjust, link } from "../router.js";
import { Block, Line } from "../text.js";
import { Ended, Finish, GROUP_COLUMNS, Versions, groupLink, stepLink, trajectoryLink } from "./rows.js";

const ENDINGS = [["", "all"], ["trained", "trained"], ["filtered", "filtered"],
  ["expired", "expired"],
  ["dead", "dead"], ["open", "open"]];
const ORDERS = [["", "newest"], ["reward", "lowest reward"], ["-reward", "highest reward"],
  ["-tokens", "longest"]];

export default function Groups({ run, rest, query }) {
  return rest.length ? html`<${Group} run=${run} group=${rest[0]} />`
    : html`<${GroupList} run=${run} query=${query} />`;
}

function GroupList({ run, query }) {
  const ended = query.get("ended") ?? "", order = query.get("order") ?? "";
  const asked = isStatic ? {} : { ended, order }; // an export has the whole list; it is sorted here
  const state = useApi(runPath(run.run, "groups"), asked, { run: run.run });
  return html`<header class="page-head"><div><h1>Groups</h1>
      <p class="note">A group holds the samples of one prompt; it ends in exactly one way.</p></div></header>
    <div class="form">
      <${Choice} label="Ended" options=${ENDINGS} value=${ended} onChange=${(v) => adjust({
        ended: v })} />
      <${Choice} label="Order" options=${ORDERS} value=${order} onChange=${(v) => adjust({
        order: v })} /></div>
    <${Loaded} state=${state} isEmpty=${(data) => !data.groups.length}
      empty="No group ended so.">${(data) =>
      html`<${GroupPages} key=${`${ended}/${order}`} run=${run} asked=${asked} first=${data}
        ended=${ended} order=${order} />`}</${Loaded}>`;
}

function GroupPages({ run, asked, first, ended, order }) {
  const [older, setOlder] = useState({ groups: [], next: undefined });
  const [error, setError] = useState(null);
  const known = new Map([...older.groups, ...first.groups].map((one) => [one.group, one]));
  const groups = arranged([...known.values()], ended, order);
  const next = older.next === undefined ? first.next : older.next;
  const more = () => get(runPath(run.run, "groups"), { ...asked, cursor: next }).then((page) =>
    setOlder({ groups: [...older.groups, ...page.groups], next: page.next }), setError);
  return html`<${Card}><${Table} label="Groups" rows=${groups} columns=${GROUP_COLUMNS(run.run)}
      href=${(g) => groupLink(run.run, g.group)} />
    ${next && html`<button class="more"
      onClick=${more}>more of ${count(first.total)} groups</button>`}
    ${error && html`<${Failure} error=${error} />`}</${Card}>`;
}

/** The groups of this ending in this order: what a server does, for pages of an export. */
export function arranged(groups, ended, order) {
  const by = { reward: ["reward_mean", 1], "-reward": ["reward_mean", -1], "-tokens": ["tokens_mean", -1] }[order]
    ?? ["group", -1];
  const value = (group) => group[by[0]] ?? (by[1] > 0 ? Infinity : -Infinity);
  return groups.filter((group) => !ended || group.ended === ended)
    .toSorted((a, b) => by[1] * (value(a) - value(b)) || b.group - a.group);
}

function Group({ run, group }) {
  const state = useApi(runPath(run.run, "groups", group), {}, { run: run.run });
  const number = Number(group);
  return html`<${Crumbs} parts=${[["Groups", link("r", [run.run, "groups"])],
    [`Group ${group}`]]} />
    <${Loaded} state=${state}>${(data) => html`
      <header class="page-head"><div><h1>Group ${group}</h1>
        <p class="note"><${Ended} group=${data.group} />${data.group.step !== null && html` in <a
          href=${stepLink(run.run, data.group.step)}>step ${data.group.step}</a>`}</p></div>
        <${Neighbours} what="group" previous=${number > 0 && groupLink(run.run, number - 1)}
          next=${groupLink(run.run, number + 1)} /></header>
      <${Prompt} data=${data} />
      <${Samples} run=${run} data=${data} />`}</${Loaded}>`;
}

function Prompt({ data }) {
  const { group } = data;
  return html`<${Card} title="Prompt">
    ${data.prompt === null ? html`<p class="empty">The prompt's text is not known.</p>`
      : html`<${Block} text=${data.prompt} shown=${2000} />`}
    <h3></h3><${Facts} facts=${[
      ["task", html`<${Line} text=${group.task} />`],
      ["reference", data.reference && html`<${Line} text=${data.reference} limit=${300} />`],
      ["mean reward", `${fixed(group.reward_mean)} ± ${fixed(group.reward_std)}`],
      ["mean tokens", number(group.tokens_mean)],
      ["finished", `${count(group.finished)} of ${count(group.samples)}`],
      ["wave", count(group.wave)],
      ["admitted (UTC)", moment(group.admitted_s)],
      ["deadline", data.deadline_s && `${number(data.deadline_s)} s`],
    ]} /></${Card}>`;
}

function Samples({ run, data }) {
  const [order, setOrder] = useState("index");
  const by = { index: () => 0, reward: (s) => -(s.row?.reward ?? -Infinity),
    tokens: (s) => -(s.row?.tokens ?? 0) }[order];
  const samples = data.samples.toSorted((a, b) => by(a) - by(b) || 0);
  return html`<div class="form"><${Choice} label="Order of the answers" value=${order}
    onChange=${setOrder}
      options=${[["index", "by number"], ["reward", "by reward"], ["tokens", "by length"]]} /></div>
    <div class="samples">${samples.map((one) => html`<${Sample} key=${one.trajectory} run=${run}
      sample=${one} />`)}</div>`;
}

function Sample({ run, sample }) {
  const { row, scores } = sample;
  return html`<article class="sample" aria-label=${`Trajectory ${sample.trajectory}`}>
    <header><a class="row-link" href=${trajectoryLink(run.run, sample.trajectory)}><${Line}
      text=${sample.trajectory} /></a>
      <span class="reward">${fixed(row?.reward)}${sample.advantage !== null && html` <span
        class="soft"
        title="advantage">${sample.advantage > 0 ? "+"
          : ""}${fixed(sample.advantage)}</span>`}</span></header>
    ${row === null && sample.answer === null ? html`<p class="empty">still running</p>`
      : html`<${Block} text=${sample.answer} shown=${1500} />`}
    ${sample.cut && html`<p class="note">cut; the trajectory has the rest</p>`}
    <footer>${row && html`<${Finish} ...${row} /><span>${count(row.tokens)} tokens</span>
      <span><${Versions} row=${row} /></span>${row.moves > 0
        && html`<span>${count(row.moves)} moves</span>`}`}
      ${!sample.trained && sample.why_not && html`<span>not trained: <${Line} text=${sample.why_not}
        limit=${120} /></span>`}
      ${Object.entries(scores ?? {}).slice(0, 8).map(([name, value]) => html`<span><${Line}
        text=${name} limit=${40} /> ${number(value)}</span>`)}
    </footer></article>`;
}
