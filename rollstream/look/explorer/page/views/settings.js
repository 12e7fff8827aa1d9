// The run's configuration, with secrets redacted by the server, and a filter over its names.

import { html, useState } from "../vendor/preact.js";
import { runPath, useApi } from "../api.js";
import { Card, Loaded, Table } from "../parts.js";
import { Line } from "../text.js";

export default function Settings({ run }) {
  const state = useApi(runPath(run.run, "settings"), {}, { run: run.run });
  const [part, setPart] = useState("");
  return html`<header class="page-head"><div><h1>Settings</h1><p class="note"><${Line}
    text=${run.place} limit=${300} /></p></div>
      <label class="field"><span>name has</span><input type="search" value=${part}
        onInput=${(event) => setPart(event.target.value)} /></label></header>
    <${Loaded} state=${state}>${(data) => html`<${Card} title="Configuration" note=${data.revision
      && html`code revision
      <span class="hash"><${Line} text=${data.revision} limit=${80} /></span>`}>
      <${Table} label="Settings" rows=${data.settings.filter((one) => one.name.includes(part))}
        limit=${400} columns=${[
        { key: "name", label: "setting", cell: (s) => html`<code><${Line} text=${s.name}
          limit=${120} /></code>` },
        { key: "value", label: "value", cell: (s) => html`<${Line} text=${s.value}
          limit=${400} />` }]} /></${Card}>`}</${Loaded}>`;
}
