// Swimlanes: rollouts × time, with versions as colours, moves as arrows, kills, terms and fences as
// lines. Drag to move, pinch or ctrl and the wheel to zoom, down to one decode. The window is in
// the address (`from`, `to`: seconds since the run's begin). The table below has the same content.

import { html, useCallback, useContext, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { Changes, get, isStatic, runPath } from "../api.js";
import { clock, count, duration } from "../format.js";
import { axisOf, draw, heightOf, palette, spotAt, versionsIn, words } from "../lanes/draw.js";
import { moved, scaled, sceneOf, tilesOf, within } from "../lanes/tiles.js";
import { Card, Failure, Table, Tiles } from "../parts.js";
import { adjust, go } from "../router.js";
import { Line } from "../text.js";
import { useTheme } from "../theme.js";
import { Finish, trajectoryLink } from "./rows.js";

const SETTLED_MS = 140; // after the last movement, before tiles are asked for
const COARSER_MAX = 12; // levels that an export may lack

export default function Lanes({ run, query }) {
  const span = run.span ?? [0, 1];
  const theme = useTheme();
  const [first, setFirst] = useState(Number(query.get("first") ?? 0)); // first of 64 lanes
  const [window, setWindow] = useState(() => within(askedWindow(query, span), span));
  useWholeRun(window, span, setWindow);
  const { tiles, error, busy } = useTiles(run, window, first);
  useAddress(window, span, query, (next) => setWindow(within(next, span)));
  const scene = useMemo(() => sceneOf(tiles), [tiles]);
  const change = (next) => setWindow(within(next, span));
  return html`<header class="page-head"><div><h1>Swimlanes</h1>
      <p class="note">Who generated what, when, under which version;${" "}
        ${theme === "dark" ? "lighter" : "darker"} is newer.</p></div>
      <${Controls} window=${window} span=${span} onChange=${change} busy=${busy} /></header>
    ${error && html`<${Failure} error=${error} />`}
    <${Card} kind="lanes"><${Picture} run=${run} scene=${scene} window=${window} span=${span}
      onChange=${change} />
      <${Key} scene=${scene} window=${window} />
      <${LanePages} tiles=${tiles} first=${first} onFirst=${(n) => { setFirst(n); adjust({ first: n
        || null }); }} /></${Card}>
    <${InWindow} run=${run} scene=${scene} window=${window} begin=${span[0]} />`;
}

/** Reads the tiles of the window once it rests; the previous ones stay until then. */
function useTiles(run, window, first) {
  const [state, setState] = useState({ tiles: [], error: null, busy: true });
  const cache = useRef(new Map());
  const changes = useContext(Changes)[run.run] ?? 0;
  useEffect(() => { cache.current = new Map([...cache.current].filter(([, t]) =>
    t.to_s < Date.now() / 1000 - 60)); }, [changes]);
  useEffect(() => {
    const aborted = new AbortController();
    const timer = setTimeout(() => {
      setState((old) => ({ ...old, busy: true }));
      tilesWithin(run, window, first, cache.current, aborted.signal).then(
        (tiles) => aborted.signal.aborted || setState({ tiles, error: null, busy: false }),
        (error) => aborted.signal.aborted || setState((old) => ({ ...old, error, busy: false })));
    }, cache.current.size ? SETTLED_MS : 0);
    return () => { clearTimeout(timer); aborted.abort(); };
  }, [run.run, window.from, window.to, first, changes]);
  return state;
}

async function tilesWithin(run, { from, to }, first, cache, signal) {
  for (let coarser = 0; ; coarser += 1) {
    try {
      return await Promise.all(tilesOf(from, to, coarser).map(async ({ z, i }) => {
        const key = `${first}/${z}/${i}`;
        if (!cache.has(key)) cache.set(key, await get(runPath(run.run, "lanes"), { z, i,
          rollouts: first || null }, signal));
        return cache.get(key);
      }));
    } catch (error) {
      if (!isStatic || error.status !== 404 || coarser === COARSER_MAX) throw error;
    }
  }
}

/** A window over the whole run stays that while the run grows. */
function useWholeRun(window, [begin, end], setWindow) {
  const before = useRef([begin, end]);
  useEffect(() => {
    const [first, last] = before.current;
    before.current = [begin, end];
    if (window.from === first && window.to === last) setWindow({ from: begin, to: end });
  }, [begin, end]);
}

/** Keeps address and window alike: a rest of the window writes it, another address moves it. */
function useAddress(window, span, query, onChange) {
  const text = `${query.get("from") ?? ""}/${query.get("to") ?? ""}`;
  const written = useRef(text); // the address that belongs to the present window
  const isFirst = useRef(true);
  useEffect(() => {
    if (isFirst.current) { isFirst.current = false; return undefined; }
    const isWhole = window.from === span[0] && window.to === span[1];
    const [from, to] = isWhole ? ["", ""]
      : [window.from, window.to].map((time) => (time - span[0]).toFixed(3));
    const timer = setTimeout(() =>
      { written.current = `${from}/${to}`; adjust({ from, to }); }, 300);
    return () => clearTimeout(timer);
  }, [window.from, window.to]);
  useEffect(() => {
    if (text === written.current) return;
    written.current = text;
    onChange(askedWindow(query, span));
  }, [text]);
}

/** The window that an address names, else the whole run. */
function askedWindow(query, [begin, end]) {
  const given = ["from", "to"].map((name) => (query.get(name) ? Number(query.get(name)) : NaN));
  return given.every(Number.isFinite) && given[0] < given[1]
    ? { from: begin + given[0], to: begin + given[1] } : { from: begin, to: end };
}

function Controls({ window, span, onChange, busy }) {
  return html`<div class="actions" role="group" aria-label="Window" aria-busy=${busy}>
    <span class="soft">${clock(window.from - span[0])} to ${clock(window.to - span[0])}, ${duration(window.to - window.from)}</span>
    <button onClick=${() => onChange(moved(window, -0.5))} aria-label="Earlier">←</button>
    <button onClick=${() => onChange(moved(window, 0.5))} aria-label="Later">→</button>
    <button onClick=${() => onChange(scaled(window, 0.5))} aria-label="Zoom in">+</button>
    <button onClick=${() => onChange(scaled(window, 2))} aria-label="Zoom out">−</button>
    <button onClick=${() => onChange({ from: span[0], to: span[1] })}>Whole run</button></div>`;
}

function Picture({ run, scene, window, span, onChange }) {
  const canvas = useRef(null), spots = useRef([]), drag = useRef(null);
  const theme = useTheme();
  const colours = useMemo(palette, [theme]);
  const [tip, setTip] = useState(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const element = canvas.current;
    const observer = new ResizeObserver(() => setWidth(element.clientWidth));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (canvas.current?.clientWidth) spots.current = draw(canvas.current, scene, window, {
      begin: span[0], colours });
  }, [scene, window.from, window.to, colours, width]);
  const place = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  useWheel(canvas, (event) => {
    const [x] = place(event);
    const axis = axisOf(window, canvas.current.clientWidth);
    if (event.ctrlKey
      || event.metaKey) onChange(scaled(window, Math.exp(event.deltaY / 250), axis.time(x)));
    else onChange(moved(window, axis.share(event.deltaX)));
  });
  const pointer = {
    onPointerDown: (event) => { drag.current = { x: event.clientX, window,
      hasMoved: false }; event.target.setPointerCapture(event.pointerId); },
    onPointerMove: (event) => {
      if (drag.current) {
        const by = event.clientX - drag.current.x;
        if (Math.abs(by) > 3) drag.current.hasMoved = true;
        const axis = axisOf(window, canvas.current.clientWidth);
        if (drag.current.hasMoved)
          { setTip(null); onChange(moved(drag.current.window, -axis.share(by))); }
        return;
      }
      const [x, y] = place(event);
      const spot = spotAt(spots.current, x, y);
      setTip(spot ? { x, y, lines: words(spot, span[0]), opens: isOpenable(spot) } : null);
    },
    onPointerUp: (event) => {
      const hasMoved = drag.current?.hasMoved;
      drag.current = null;
      const spot = !hasMoved && spotAt(spots.current, ...place(event));
      if (spot) openSpot(run, spot);
    },
    onPointerLeave: () => setTip(null),
    onDblClick: (event) =>
      onChange(scaled(window, 0.25, axisOf(window, canvas.current.clientWidth).time(place(event)[0]))),
    onKeyDown: (event) => {
      const next = { ArrowLeft: () => moved(window, -0.2), ArrowRight: () =>
        moved(window, 0.2), "+": () => scaled(window, 0.5),
        "=": () => scaled(window, 0.5), "-": () => scaled(window, 2) }[event.key];
      if (next) { event.preventDefault(); onChange(next()); }
    },
  };
  return html`<div class="canvas-box pan"><canvas ref=${canvas} tabindex="0" role="img"
    height=${heightOf(scene)}
    aria-label=${`Swimlanes of ${scene.lanes.length} lanes; the table below lists what they show`} ...${pointer}></canvas>
    ${tip && html`<${Tip} tip=${tip} />`}</div>`;
}

/** Wheel events must not be passive, or the page zooms as well. */
function useWheel(canvas, act) {
  const present = useRef(act);
  present.current = act;
  useEffect(() => {
    const wheel = (event) => {
      const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!event.ctrlKey && !event.metaKey && !isSideways) return; // the page scrolls
      event.preventDefault();
      present.current(event);
    };
    const element = canvas.current;
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  }, []);
}

function Tip({ tip }) {
  const ref = useCallback((element) => {
    if (!element) return;
    const room = element.parentElement.clientWidth;
    element.style.left = tip.x > room / 2 ? "" : `${tip.x + 14}px`;
    element.style.right = tip.x > room / 2 ? `${room - tip.x + 14}px` : "";
    element.style.top = `${tip.y + 14}px`;
  }, [tip]);
  return html`<div class="tip" ref=${ref}>${tip.lines.map((text, n) => html`<div class=${n ? "soft"
    : ""}><${Line} text=${text} /></div>`)}
    ${tip.opens && html`<div class="soft">click to open</div>`}</div>`;
}

function isOpenable({ kind }) {
  return ["trajectory", "decode", "step"].includes(kind);
}

function openSpot(run, { kind, of }) {
  if (kind === "step") go("r", [run.run, "steps", of.step]);
  else if (isOpenable({ kind })) go("r", [run.run, "trajectories", of.trajectory]);
}

function Key({ scene, window }) {
  const [oldest, newest] = versionsIn(scene, window);
  const isTimed = scene.bins.some((bin) => bin.finished == null); // a simulated run
  const isBinned = scene.bins.length > 0 && scene.items.length === 0;
  return html`<ul class="legend lanes-key">
    <li><span class="shades" aria-hidden="true">${[0, 2, 4, 6, 8, 9].map((n) => html`<i
      class=${`v${n}`}></i>`)}</span>v${oldest} to v${newest}</li>
    <li><span class="sign serving" aria-hidden="true">▾</span>weights taken</li><li><span
      class="sign move" aria-hidden="true">↓</span>move</li>
    <li><span class="sign term" aria-hidden="true">┆</span>new term, fence</li><li><span
      class="sign kill" aria-hidden="true">✕</span>killed</li>
    ${isBinned && html`<li>${isTimed ? "height: share of the time in which the rollout decodes"
      : "height: how many run at once; zoom in for each"}</li>`}
    ${Object.entries(scene.cut).filter(([, n]) => n > 0).map(([kind, n]) =>
      html`<li>${count(n)} ${kind} not drawn</li>`)}</ul>`;
}

function LanePages({ tiles, first, onFirst }) {
  const total = Math.max(0, ...tiles.map((tile) => tile.lanes_total ?? 0));
  if (total <= 64) return null;
  return html`<div class="actions"><button disabled=${first === 0} onClick=${() =>
    onFirst(Math.max(0, first - 64))}>previous lanes</button>
    <span class="soft">lanes ${first + 1} to ${Math.min(total, first + 64)} of ${count(total)}</span>
    <button disabled=${first + 64 >= total} onClick=${() =>
      onFirst(first + 64)}>next lanes</button></div>`;
}

/** The same content for readers without a pointer. */
function InWindow({ run, scene, window, begin }) {
  const inside = (start, end) => start <= window.to && (end ?? window.to) >= window.from;
  const items = scene.items.filter((one) => inside(one.start, one.end));
  const steps = scene.steps.filter((one) => inside(one.start, one.end));
  const moments = ["moves", "kills", "terms", "fences", "serving"].flatMap((kind) =>
    scene[kind].filter((one) => inside(one.time, one.time)).map((of) => ({ kind: kind === "serving"
      ? kind : kind.slice(0, -1), of, time: of.time })))
    .toSorted((a, b) => a.time - b.time);
  return html`<${Tiles} tiles=${[...(run.simulated ? [] : [["trajectories in this window",
    items.length ? count(items.length) : "zoom in"]]), ["steps", count(steps.length)],
      ["moves", count(scene.moves.filter((m) => inside(m.time, m.time)).length)],
      ...(run.simulated ? [] : [["kills", count(scene.kills.filter((m) =>
        inside(m.time, m.time)).length)]]),
      ["weights taken", count(scene.serving.filter((m) => inside(m.time, m.time)).length)]]} />
    <div class="grid two">
    ${items.length > 0 && html`<${Card} title="Trajectories in this window"><${Table}
      label="Trajectories in this window" rows=${items} limit=${20}
      href=${(one) => trajectoryLink(run.run, one.trajectory)} columns=${[
        { key: "trajectory", label: "trajectory", cell: (o) => html`<${Line}
          text=${o.trajectory} />` },
        { key: "lane", label: "rollout", kind: "keep", cell: (o) => html`<${Line} text=${o.lane}
          limit=${28} />` },
        { key: "version", label: "versions", kind: "n", cell: (o) => o.last != null
          && o.last !== o.version ? `v${o.version} → v${o.last}` : `v${o.version}` },
        { key: "tokens", label: "tokens", kind: "n", cell: (o) => count(o.tokens) },
        { key: "finish", label: "finish", cell: (o) => html`<${Finish} finish=${o.finish} />` },
        { key: "start", label: "from", kind: "n", cell: (o) => clock(o.start - begin) },
        { key: "end", label: "took", kind: "n", cell: (o) =>
          duration(o.end - o.start) }]} /></${Card}>`}
    ${moments.length > 0 && html`<${Card} title="Moments in this window"><${Table}
      label="Moments in this window" rows=${moments} limit=${20} columns=${[
        { key: "time", label: "at", kind: "n", cell: (m) => clock(m.time - begin) },
        { key: "kind", label: "kind", cell: (m) => m.kind === "serving" ? "weights" : m.kind },
        { key: "what", label: "what", cell: (m) => html`<${Line}
          text=${words(m, begin)[0]} />` }]} /></${Card}>`}</div>`;
}
