// Two maps of all trajectories: lag × reward, and length × difficulty. A brush (drag, or the fields
// beside it) selects trajectories, which are listed below; the selection is in the address.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { runPath, useApi } from "../api.js";
import { count, number } from "../format.js";
import { Card, Choice, Loaded } from "../parts.js";
import { adjust, go } from "../router.js";
import { colour, useTheme } from "../theme.js";
import { Results } from "./search.js";

const KINDS = [["lag", "lag × reward"], ["length", "length × difficulty"]];
const WORDS = { lag: "lag (steps)", reward: "reward",
  tokens: "generated tokens", group_reward: "mean reward of the group" };
const HEIGHT = 340, LEFT = 70, BOTTOM = 40, TOP = 10, RIGHT = 12;
const WHOLE = new Set(["lag", "tokens"]); // axes that count: the end of a selection is the last inside

export default function Maps({ run, rest, query }) {
  const kind = rest[0] ?? "lag";
  const state = useApi(runPath(run.run, "map", kind), {}, { run: run.run });
  return html`<header class="page-head"><div><h1>Maps</h1>
      <p class="note">${kind === "lag" ? "Does a stale answer earn less?"
        : "Does working at length pay, and on which prompts? Difficult ones are at the bottom."}</p></div>
      <${Choice} label="Map" options=${KINDS} value=${kind} onChange=${(next) => go("r", [run.run,
        "maps", next])} /></header>
    <${Loaded} state=${state} isEmpty=${(data) => data.cells.length === 0}
      empty="No trajectory has finished.">${(data) =>
      html`<${WithBrush} run=${run} data=${data} query=${query} />`}</${Loaded}>`;
}

function WithBrush({ run, data, query }) {
  const names = [`${data.x.name}_min`, `${data.x.name}_max`, `${data.y.name}_min`, `${data.y.name}_max`];
  const chosen = names.map((name) => query.get(name)).map((text) => (text === null || text === ""
    ? null : Number(text)));
  const isChosen = chosen.some((value) => value !== null);
  const choose = (values) =>
    adjust(Object.fromEntries(names.map((name, n) => [name, values?.[n] ?? null])));
  const filters = Object.fromEntries(names.map((name, n) => [name, chosen[n]]));
  return html`<${Card} title=${KINDS.find(([key]) => key === data.kind)?.[1]}
      note=${`${count(data.total)} trajectories${data.index?.complete === false
        ? `, ${count(data.index.trajectories)} of them read so far` : ""}`}>
      <${Picture} data=${data} chosen=${isChosen ? chosen : null} onChoose=${choose} />
      <div class="form">${names.map((name, n) => html`<label class="field short">
        <span>${WORDS[name.slice(0, -4)] ?? name}, ${n % 2 ? "to" : "from"}</span>
          <input type="number" step="any" value=${chosen[n] ?? ""} onChange=${(event) =>
            adjust({ [name]: event.target.value })} /></label>`)}
        ${isChosen && html`<button onClick=${() => choose(null)}>Clear</button>`}</div></${Card}>
    ${isChosen ? html`<${Results} run=${run} filters=${filters} label="Selected trajectories" />`
      : html`<p class="hint">Drag over the map to select trajectories; a click selects one cell.</p>`}`;
}

function Picture({ data, chosen, onChoose }) {
  const canvas = useRef(null), box = useRef(null);
  const theme = useTheme();
  const [width, setWidth] = useState(0);
  const [drag, setDrag] = useState(null);
  const [tip, setTip] = useState(null);
  const map = useMemo(() => geometry(data, width), [data, width]);
  useEffect(() => {
    const element = box.current;
    const observer = new ResizeObserver(() => setWidth(element.clientWidth));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  useEffect(() => { if (width && canvas.current) paint(canvas.current, map, data,
    { chosen, drag }); }, [map, data, chosen?.join(), drag, theme]);
  const place = (event) => {
    const from = canvas.current.getBoundingClientRect();
    return [event.clientX - from.left, event.clientY - from.top];
  };
  const down = (event) =>
    { const at = place(event); setDrag([at, at]); event.target.setPointerCapture(event.pointerId); };
  const move = (event) => {
    const at = place(event);
    if (drag) setDrag([drag[0], at]);
    else setTip(cellWords(data, map, at));
  };
  const up = () => {
    if (!drag) return;
    onChoose(selection(data, map, drag));
    setDrag(null);
  };
  return html`<div class="canvas-box brush" ref=${box}><canvas ref=${canvas} role="img"
    height=${HEIGHT}
      aria-label=${`${WORDS[data.x.name]} by ${WORDS[data.y.name]}: ${count(data.total)} trajectories in ${data.cells.length} cells; the fields below select`}
      onPointerDown=${down} onPointerMove=${move} onPointerUp=${up} onPointerCancel=${() =>
        setDrag(null)} onPointerLeave=${() => setTip(null)}></canvas>
    <p class="note map-note" aria-hidden="true">${tip
      ?? `${theme === "dark" ? "lighter" : "darker"}: more trajectories`}</p></div>`;
}

/** Where bins are on the canvas: equal widths, whatever the edges are. */
function geometry(data, width) {
  const nx = data.x.edges.length - 1, ny = data.y.edges.length - 1;
  const w = (width - LEFT - RIGHT) / nx, h = (HEIGHT - TOP - BOTTOM) / ny;
  return { width, nx, ny, w, h, x: (bin) => LEFT + bin * w, y: (bin) =>
    HEIGHT - BOTTOM - (bin + 1) * h,
    binX: (x) => Math.max(0, Math.min(nx - 1, Math.floor((x - LEFT) / w))),
    binY: (y) => Math.max(0, Math.min(ny - 1, Math.floor((HEIGHT - BOTTOM - y) / h))) };
}

function paint(canvas, map, data, { chosen, drag }) {
  const ratio = devicePixelRatio || 1;
  canvas.width = map.width * ratio;
  canvas.height = HEIGHT * ratio;
  canvas.style.height = `${HEIGHT}px`;
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  g.fillStyle = colour("--track");
  g.fillRect(LEFT, TOP, map.nx * map.w, map.ny * map.h);
  const shades = Array.from({ length: 10 }, (_, n) => colour(`--v${n}`));
  const most = Math.log1p(Math.max(...data.cells.map(([, , n]) => n)));
  const gap = map.w > 6 && map.h > 4 ? 1 : 0;
  for (const [bx, by, n] of data.cells) {
    g.fillStyle = shades[Math.min(9, Math.floor((10 * Math.log1p(n)) / (most * 1.001 || 1)))];
    g.fillRect(map.x(bx), map.y(by), Math.max(1, map.w - gap), Math.max(1, map.h - gap));
  }
  labels(g, map, data);
  const frame = drag ? pixels(drag) : chosen && rectangle(data, map, chosen);
  if (frame) {
    g.strokeStyle = colour("--c2");
    g.lineWidth = 2;
    g.strokeRect(...frame);
    g.fillStyle = colour("--c2");
    g.globalAlpha = 0.12;
    g.fillRect(...frame);
    g.globalAlpha = 1;
  }
}

function labels(g, map, data) {
  g.fillStyle = colour("--soft");
  g.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const everyX = Math.ceil(map.nx / Math.max(1, Math.floor(map.width / 70)));
  g.textAlign = "center";
  for (let n = 0; n < map.nx; n += everyX) {
    const isOne = WHOLE.has(data.x.name) && data.x.edges[n + 1] - data.x.edges[n] <= 1;
    g.fillText(number(data.x.edges[n]), map.x(n) + (isOne ? map.w / 2 : 0), HEIGHT - BOTTOM + 16);
  }
  g.fillText(WORDS[data.x.name], LEFT + (map.nx * map.w) / 2, HEIGHT - 6);
  g.textAlign = "right";
  const everyY = Math.ceil(map.ny / 8);
  for (let n = 0; n <= map.ny; n += everyY) g.fillText(number(data.y.edges[n]), LEFT - 8, map.y(n - 1) + 4);
  g.save();
  g.translate(14, TOP + (map.ny * map.h) / 2);
  g.rotate(-Math.PI / 2);
  g.textAlign = "center";
  g.fillText(WORDS[data.y.name], 0, 0);
  g.restore();
}

function pixels([[x, y], [u, v]]) {
  return [Math.min(x, u), Math.min(y, v), Math.abs(u - x), Math.abs(v - y)];
}

/** The values that a drag encloses: whole bins, so that what is drawn is what is selected. */
export function selection(data, map, [[x, y], [u, v]]) {
  const [low, high] = [map.binX(Math.min(x, u)), map.binX(Math.max(x, u))];
  const [bottom, top] = [map.binY(Math.max(y, v)), map.binY(Math.min(y, v))];
  return [...bounds(data.x, low, high), ...bounds(data.y, bottom, top)];
}

function bounds({ name, edges }, low, high) {
  const end = edges[high + 1], isLast = high + 2 === edges.length;
  const inside = isLast ? end : WHOLE.has(name) ? Math.ceil(end) - 1
    : Number((end - 1e-6).toPrecision(8));
  return [edges[low], inside];
}

function rectangle(data, map, [x0, x1, y0, y1]) {
  const bin = (edges, value, missing) => value === null ? missing
    : Math.max(0, Math.min(edges.length - 2, edges.findLastIndex((edge) => edge <= value)));
  const [low, high] = [bin(data.x.edges, x0, 0), bin(data.x.edges, x1, map.nx - 1)];
  const [bottom, top] = [bin(data.y.edges, y0, 0), bin(data.y.edges, y1, map.ny - 1)];
  return [map.x(low), map.y(top), (high - low + 1) * map.w, (top - bottom + 1) * map.h];
}

function cellWords(data, map, [x, y]) {
  const [bx, by] = [map.binX(x), map.binY(y)];
  const found = data.cells.find(([cx, cy]) => cx === bx && cy === by);
  const range = ({ edges }, bin) => `${number(edges[bin])} to ${number(edges[bin + 1])}`;
  return `${count(found?.[2] ?? 0)} with ${WORDS[data.x.name]} ${range(data.x, bx)}, ${WORDS[data.y.name]} ${range(data.y, by)}`;
}
