// A query of one's own over the views of `rollstream query`; only where the server was started with
// --sql. The query is in the address.

import { html, useState } from "../vendor/preact.js";
import { runPath, useApi } from "../api.js";
import { count, duration, number } from "../format.js";
import { Card, Crumbs, Loaded, Table } from "../parts.js";
import { adjust, link } from "../router.js";
import { Line } from "../text.js";

const EXAMPLE = "SELECT step, reward_mean, length_median FROM steps ORDER BY step";

export default function Sql({ run, query }) {
  const asked = query.get("q") ?? "";
  const [text, setText] = useState(asked || EXAMPLE);
  const submit = (event) => { event.preventDefault(); adjust({ q: text }); };
  return html`<${Crumbs} parts=${[["Search", link("r", [run.run, "search"])], ["SQL"]]} />
    <header class="page-head"><h1>SQL</h1></header>
    <form onSubmit=${submit}><label class="field sql"><span>query</span><textarea rows="5"
      value=${text} spellcheck="false"
        onInput=${(event) => setText(event.target.value)}
        onKeyDown=${(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey)
          && submit(event)}></textarea></label>
      <p><button class="primary" type="submit">Run</button> <span
        class="soft">ctrl + enter</span></p></form>
    ${asked && html`<${Answer} key=${asked} run=${run} sql=${asked} />`}<${Views} />`;
}

function Answer({ run, sql }) {
  const state = useApi(runPath(run.run, "sql"), { q: sql }, { run: run.run, still: true });
  return html`<${Loaded} state=${state}>${(data) => html`<${Card} title="Answer"
    note=${`${count(data.rows.length)} rows${data.cut ? ", cut" : ""}, ${duration(data.seconds)}`}>
    <${Table} label="Answer" rows=${data.rows} limit=${200} columns=${data.names.map((name, n) => ({
      key: n, label: html`<${Line} text=${name} limit=${60} />`,
      kind: /INT|DOUBLE|FLOAT|DECIMAL/.test(data.kinds[n]) ? "n" : "", cell: (row) =>
        shown(row[n]) }))} /></${Card}>`}</${Loaded}>`;
}

function shown(value) {
  if (typeof value === "number") return number(value, 6);
  return html`<${Line} text=${value === null ? "–" : typeof value === "string" ? value
    : JSON.stringify(value)} limit=${400} />`;
}

function Views() {
  const state = useApi("views", {}, { still: true });
  return html`<${Loaded} state=${state}>${(data) => html`<${Card}
    title="Views">${data.views.map((view) => html`<details><summary><code>${view.name}</code>
    <span class="soft"> ${view.sentence}</span></summary><p
      class="mono">${Object.entries(view.columns).map(([name, kind]) => `${name} ${kind}`).join(", ")}</p></details>`)}</${Card}>`}</${Loaded}>`;
}
