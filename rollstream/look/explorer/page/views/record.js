// One record of the log as it is, with its envelope, its fields, and links to what it names.

import { html } from "../vendor/preact.js";
import { runPath, useApi } from "../api.js";
import { count, moment } from "../format.js";
import { Neighbours } from "../keys.js";
import { Card, Crumbs, Facts, Loaded } from "../parts.js";
import { link } from "../router.js";
import { Block, Line } from "../text.js";

export default function Record({ run, rest }) {
  const [topic, partition, offset] = rest;
  const state = useApi(runPath(run.run, "records", topic, partition, offset), {}, { run: run.run,
    still: true });
  const to = (other) => other !== null && link("r", [run.run, "records", topic, partition, other]);
  return html`<${Crumbs} parts=${[["Audit", link("r", [run.run, "audit"])],
    [`${topic} ${partition}:${offset}`]]} />
    <${Loaded} state=${state}>${(data) => html`
      <header class="page-head"><div><h1><${Line} text=${data.schema} limit=${80} /></h1>
        <p class="note"><${Line} text=${data.summary} limit=${400} /></p></div>
        <${Neighbours} what="record" previous=${to(data.previous)} next=${to(data.next)} /></header>
      <${Card} title="Envelope"><${Facts} facts=${[
        ["topic", html`<${Line} text=${data.topic} />`], ["partition", count(data.partition)],
          ["offset", count(data.offset)],
        ["written (UTC)", moment(data.time_s)], ["term", data.term !== null && count(data.term)],
        ["key", data.key && html`<${Line} text=${data.key} limit=${120} />`],
        ["void", data.void && "yes: a higher term had opened"], ["not readable", data.reason
          && html`<${Line} text=${data.reason} limit=${300} />`],
      ]} /></${Card}>
      ${data.links.length > 0 && html`<div class="chips">${data.links.slice(0, 200).map((one) =>
        html`<a class="chip"
        href=${`#/r/${encodeURIComponent(run.run)}/${one.to}`}><${Line} text=${one.text}
          limit=${60} /></a>`)}</div>`}
      <${Card} title="Fields"><dl
        class="fields">${Object.entries(data.fields ?? {}).map(([name, value]) => html`<dt><${Line}
        text=${name} limit=${80} /></dt>
        <dd><${Block} text=${typeof value === "string" ? value
          : JSON.stringify(value, null, Array.isArray(value) && value.every((v) =>
          typeof v !== "object") ? 0 : 1)}
          shown=${1200} /></dd>`)}</dl></${Card}>`}</${Loaded}>`;
}
