// The frame of the explorer: rail of views, choice of the run, keys, and the view that the address
// names. A view is a function of `{ run, route }`; `run` is the run's object of `api/runs`.

import { Component, html, render, useEffect, useRef, useState } from "./vendor/preact.js";
import { Changes, get, hasView, isStatic, useEvents } from "./api.js";
import { count } from "./format.js";
import { Help, useKeys } from "./keys.js";
import { Failure, useLoaded } from "./parts.js";
import { go, link, useRoute } from "./router.js";
import { Line } from "./text.js";
import { startTheme, toggleTheme, useTheme } from "./theme.js";
import { tree, treeOf } from "./tree.js";

/** The views of a run: name in the address, word in the rail, letter after g. */
const VIEWS = [
  ["overview", "Overview", "o"],
  ["steps", "Steps", "s"],
  ["groups", "Groups", "r"],
  ["lanes", "Swimlanes", "l"],
  ["weights", "Weights", "w"],
  ["maps", "Maps", "m"],
  ["questions", "Questions", "q"],
  ["search", "Search", "f"],
  ["audit", "Audit", "a"],
  ["compare", "Compare", "c"],
  ["settings", "Settings", "e"],
];
const SIMULATED = ["overview", "steps", "lanes", "compare", "settings"]; // what a simulation has
const INSIDE = { trajectories: "groups", records: "audit", sql: "search" }; // no entry of their own

// Each view is a module of its own, fetched when it is first opened.
const MODULES = {
  overview: () => import("./views/overview.js"),
  steps: () => import("./views/steps.js"),
  groups: () => import("./views/groups.js"),
  trajectories: () => import("./views/trajectory.js"),
  lanes: () => import("./views/lanes.js"),
  weights: () => import("./views/weights.js"),
  maps: () => import("./views/maps.js"),
  questions: () => import("./views/questions.js"),
  search: () => import("./views/search.js"),
  audit: () => import("./views/audit.js"),
  records: () => import("./views/record.js"),
  compare: () => import("./views/compare.js"),
  settings: () => import("./views/settings.js"),
  sql: () => import("./views/sql.js"),
};

/** Where an address leads: `#/r/0/steps/12`, or the first run's overview. */
function placeOf(route) {
  if (route.name === "r") {
    const [run = "0", view = "overview", ...rest] = route.parts;
    return { run, view, rest };
  }
  if (route.name === "compare") return { run: "0", view: "compare", rest: route.parts };
  return { run: "0", view: "overview", rest: [] };
}

function App() {
  const [turn, setTurn] = useState(0);
  const runs = useLoaded((signal) => get("runs", {}, signal), [turn]);
  if (runs.data === undefined) {
    return runs.error ? html`<main><${Failure} error=${runs.error} /></main>`
      : html`<p class="loading" role="status">Loading…</p>`;
  }
  return html`<${Frame} listed=${runs.data} onStale=${() => setTurn((old) => old + 1)} />`;
}

function Frame({ listed, onStale }) {
  const route = useRoute();
  const place = placeOf(route);
  const events = useEvents(listed.runs);
  useFresh(listed, events, onStale);
  const [isHelpOpen, setHelpOpen] = useState(false);
  const run = present(listed.runs.find((one) => one.run === place.run), events.latest[place.run]);
  useKeys({
    search: () => openSearch(place.run),
    up: () => goUp(),
    help: () => setHelpOpen(true),
    theme: toggleTheme,
    open: (letter) => openView(place, letter),
  });
  useTitle(run, place);
  return html`<${Changes.Provider} value=${events.changes}>
    <a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.querySelector("main").focus();
    }}>Skip to the view</a>
    <div class="frame">
      <${Rail} listed=${listed} place=${place} run=${run} events=${events}
        onHelp=${() => setHelpOpen(true)} />
      <main id="main" tabindex="-1">${run
        ? html`<${Guarded} key=${`${place.run}/${place.view}/${place.rest.join("/")}`}>
            <${View} listed=${listed} view=${place.view} run=${run} rest=${place.rest}
              query=${route.query} /></${Guarded}>`
        : html`<${Failure} error=${new Error(`there is no run ${place.run} here`)} />`}</main>
    </div>
    <${Help} isOpen=${isHelpOpen} onClose=${() => setHelpOpen(false)} />
  </${Changes.Provider}>`;
}

/** Reads the list of runs again when a run has grown: its span of time, its step, its index. */
function useFresh(listed, events, onStale) {
  const changes = Object.values(events.changes).reduce((sum, n) => sum + n, 0);
  const isBehind = listed.runs.some((run) => !run.index.complete
    && events.latest[run.run]?.index?.complete);
  useEffect(() => {
    if (changes > 0 || isBehind) onStale();
  }, [changes, isBehind]);
}

/** The run with what the newest events report about it. */
function present(run, latest) {
  if (!run) return undefined;
  const { change, index } = latest ?? {};
  return { ...run, step: change?.step ?? run.step, phase: change?.phase ?? run.phase,
    index: index ?? run.index };
}

/** Shows what went wrong in a view in its place, so that the other views stay reachable. */
class Guarded extends Component {
  componentDidCatch(error) {
    console.error(error);
    this.setState({ error });
  }

  render({ children }, { error }) {
    return error ? html`<${Failure} error=${error} />` : children;
  }
}

function View({ view, ...given }) {
  const module = useLoaded(() => (MODULES[view] ?? MODULES.overview)(), [view]);
  if (module.error) return html`<${Failure} error=${module.error} />`;
  return module.data ? html`<${module.data.default} ...${given} />` : null;
}

function Rail({ listed, place, run, events, onHelp }) {
  const several = listed.runs.length > 1;
  const here = INSIDE[place.view] ?? place.view;
  const theme = useTheme();
  const views = VIEWS.filter(([name]) => (name !== "compare" || several) && hasView(name)
    && (!run?.simulated || SIMULATED.includes(name)));
  return html`<div class="rail">
    <a class="brand" href=${link("r", [place.run, "overview"])}>
      <img src=${document.querySelector("link[rel=icon]").href} alt="" width="22" height="22" />Rollstream</a>
    <div class="runs">${several
      ? html`<select aria-label="Run" value=${place.run} onChange=${(event) =>
          go("r", [event.target.value, place.view === "compare" ? "overview" : here])}>
          ${listed.runs.map((one) => html`<option value=${one.run}
            selected=${one.run === place.run}>${one.name}</option>`)}</select>`
      : html`<${Line} text=${run?.name} limit=${40} />`}
      <div><${Pulse} run=${run} events=${events} /></div></div>
    <nav aria-label="Views"><ul class="views">${views.map(([name, word, letter]) => html`<li>
      <a href=${viewLink(listed, place.run, name)} aria-current=${name === here ? "page"
        : undefined}
        aria-keyshortcuts=${`g ${letter}`}>${word}<kbd
          aria-hidden="true">${letter}</kbd></a></li>`)}
    </ul></nav>
    <div class="foot">
      <button class="plain" onClick=${toggleTheme} title="t">${theme === "dark" ? "Light"
        : "Dark"}</button>
      <button class="plain" onClick=${onHelp} title="?">Keys</button></div>
  </div>`;
}

function Pulse({ run, events }) {
  if (!run) return null;
  const follows = events.connected && ["starting", "training"].includes(run.phase);
  const index = run.index;
  return html`<span class=${`live ${follows ? "on" : ""}`}><i aria-hidden="true"></i>
    <span>${run.phase}, step ${count(run.step)}${run.steps ? ` of ${count(run.steps)}` : ""}</span>
  </span>${index && !index.complete && html`<div class="note" role="status">reading trajectories:
    ${count(index.trajectories)} of ${count(index.total)}</div>`}`;
}

function viewLink(listed, run, name) {
  return name === "compare"
    ? link("compare", [], { runs: listed.runs.map((one) => one.run).slice(0, 4).join(",") })
    : link("r", [run, name]);
}

function openSearch(run) {
  const field = document.querySelector('main input[type="search"]');
  if (field) field.focus();
  else go("r", [run, "search"]);
}

function goUp() {
  const crumbs = document.querySelectorAll("main .crumbs a");
  if (!crumbs.length) return false;
  crumbs[crumbs.length - 1].click();
  return true;
}

function openView(place, letter) {
  const found = VIEWS.find(([, , key]) => key === letter);
  if (!found) return false;
  document.querySelector(`.views a[aria-keyshortcuts="g ${letter}"]`)?.click();
  return true;
}

function useTitle(run, place) {
  const path = [place.view, ...place.rest].join(" ");
  const first = useRef(true);
  useEffect(() => {
    document.title = `${path} · ${run?.name ?? "no run"} · Rollstream`;
    if (first.current) first.current = false;
    else {
      scrollTo(0, 0); // another view begins at its top; a change within a view does not move
      document.querySelector("main")?.focus({ preventScroll: true });
    }
  }, [path, run?.name]);
}

startTheme();
document.documentElement.dataset.source = isStatic ? "static" : "server";
const app = document.getElementById("app");
const answers = globalThis.rollstreamAnswers;
if (answers) answers["r/0/sheet"] = { parts: treeOf(app.querySelector("main")) };
app.replaceChildren();
render(answers && !answers.runs ? html`<main>${tree(answers["r/0/sheet"].parts)}</main>`
  : html`<${App} />`, app);
