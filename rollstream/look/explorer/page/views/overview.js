// A run at a glance: its sheet, as the report shows it. Other runs of the same command are drawn
// into the same curves (`?with=1,2`); a drag over a curve shows these steps alone (`?steps=`).

import { html, useContext, useEffect, useState } from "../vendor/preact.js";
import { Changes, get, hasView, isStatic, runPath, useApi } from "../api.js";
import { Loaded, Select, useLoaded } from "../parts.js";
import { adjust, go } from "../router.js";
import { Line } from "../text.js";
import { tree } from "../tree.js";

export default function Overview({ run, query, listed }) {
  const steps = query.get("steps") ?? "", metric = query.get("metric") ?? "";
  const others = (query.get("with") ?? "").split(",")
    .filter((one) => listed.runs.some((known) => known.run === one && one !== run.run));
  const [turn, setTurn] = useState(0);
  const changes = useContext(Changes)[run.run] ?? 0;
  const state = useLoaded((signal) => get(runPath(run.run, "sheet"), { steps }, signal),
    [run.run, steps, changes, turn]);
  useEffect(() => {
    if (!state.data?.again_s) return undefined; // a newer one is to come
    const timer = setTimeout(() => setTurn(turn + 1), 1000 * state.data.again_s);
    return () => clearTimeout(timer);
  }, [state.data]);
  const actions = { onPick: (step) => go("r", [run.run, "steps", step]),
    onZoom: isStatic ? undefined : (from, to) => adjust({ steps: `${from}-${to}` }) };
  return html`<${Loaded} state=${state}>${(data) => html`
    ${tree(data.parts.slice(0, 1))}
    <${Others} run=${run} listed=${listed} chosen=${others} />
    ${steps && html`<p class="hint">Steps ${steps.replace("-", " to ")} alone.
      ${" "}<button class="chip" onClick=${() => adjust({ steps: null })}>all steps</button></p>`}
    ${others.length > 0 && html`<${Compared} runs=${[run.run, ...others]} />`}
    ${tree(data.parts.slice(1), actions)}
    ${!run.living && !run.simulated && hasView("learned") && html`<${Learned} run=${run} />`}
    ${data.metrics?.length > 0 && html`<${Another} run=${run} metric=${metric}
      metrics=${data.metrics} actions=${actions} />`}`}</${Loaded}>`;
}

function Others({ run, listed, chosen }) {
  const rest = listed.runs.filter((one) => one.run !== run.run);
  if (!rest.length) return null;
  const toggled = (one) => chosen.includes(one) ? chosen.filter((c) =>
    c !== one) : [...chosen, one];
  return html`<div class="chips actions" role="group" aria-label="Compare with">
    <span class="soft">with</span>${rest.slice(0, 7).map((one) => html`<button class="chip"
      aria-pressed=${chosen.includes(one.run)}
      onClick=${() => adjust({ with: toggled(one.run).join(",") })}>
      <i class=${`swatch line c${chosen.includes(one.run) ? 2 + chosen.indexOf(one.run) : 7}`}
        aria-hidden="true"></i><${Line} text=${one.name} limit=${40} /></button>`)}</div>`;
}

/** What takes queries over all records, which would burden a run that lives. */
function Learned({ run }) {
  const state = useLoaded((signal) => get(runPath(run.run, "learned"), {}, signal), [run.run]);
  return html`<${Loaded} state=${state}>${(data) => tree(data.parts)}</${Loaded}>`;
}

/** The curves of several runs. */
export function Compared({ runs, onPick }) {
  const state = useApi("compare/sheet", { runs: runs.join(",") }, { run: runs[0] });
  return html`<${Loaded} state=${state}>${(data) => tree(data.parts, { onPick })}</${Loaded}>`;
}

function Another({ run, metric, metrics, actions }) {
  return html`<div class="form"><${Select} label="draw another metric" value=${metric}
      options=${[["", "–"], ...metrics.map((name) => [name, name])]}
      onChange=${(chosen) => adjust({ metric: chosen })} />
      <p class="note">A click on a curve opens the step${actions.onZoom
        && "; a drag shows these steps alone"}.</p></div>
    ${metrics.includes(metric) && html`<${Metric} run=${run} metric=${metric}
      actions=${actions} />`}`;
}

function Metric({ run, metric, actions }) {
  const state = useApi(runPath(run.run, "metrics", metric), {}, { run: run.run });
  return html`<${Loaded} state=${state}>${(data) => html`<div class="grid">${
    tree(data.parts, actions)}</div>`}</${Loaded}>`;
}
