// Curves over steps or time, drawn by uPlot on a canvas. A chart follows its box in width and the
// theme in colour. Charts of one view share their cursor. A reader without a pointer finds the last
// values in the chart's label, and every value in the tables of the steps view.

import { html, useEffect, useRef } from "./vendor/preact.js";
import uPlot from "./vendor/uplot.js";
import { number } from "./format.js";
import { colour, useTheme } from "./theme.js";

const HEIGHT = 210;
const WHOLE_STEPS = [1, 2, 5].flatMap((n) => Array.from({ length: 9 }, (_, e) => n * 10 ** e))
  .sort((a, b) => a - b); // x counts steps, versions or tokens

/**
 * `series` are `{ name, points: [[x, y]…], colour: 1…8, dash?, width? }`; the x values of all
 * series are joined; `named` shows the name of a single one, too. `onPick(x)` is called for a
 * click, with the nearest x.
 */
export function Chart({ title, series, unit = "step", group, onPick, height = HEIGHT, zero = true,
  named = false }) {
  const box = useRef(null);
  const plot = useRef(null);
  const theme = useTheme();
  const shape = series.map((s) => `${s.name}/${s.colour}/${s.dash ?? ""}`).join();
  useEffect(() => {
    const element = box.current; // the reference is empty again before the last observation
    if (!element) return undefined;
    const options = chartOptions({ series, unit, group, height, zero, onPick, box: element });
    const drawn = new uPlot(options, joined(series), element);
    plot.current = drawn;
    const observer = new ResizeObserver(() => drawn.setSize({
      width: element.clientWidth, height }));
    observer.observe(element);
    return () => { observer.disconnect(); drawn.destroy(); plot.current = null; };
  }, [shape, theme, unit, height]);
  useEffect(() => {
    if (!plot.current) return;
    const isWhole = !isZoomed(plot.current); // a reader who zoomed in stays there
    plot.current.setData(joined(series), isWhole);
    if (!isWhole) plot.current.redraw();
  }, [series]);
  return html`<div class="chart">
    ${(series.length > 1 || named) && html`<ul class="legend">${series.map((s) => html`<li>
      <i class=${`swatch line c${s.colour} ${s.dash ? "dash" : ""}`}
        aria-hidden="true"></i>${s.name}
    </li>`)}</ul>`}
    <div class=${`chart-box ${onPick ? "picks" : ""}`} ref=${box} role="img"
      aria-label=${chartLabel(title, series)}></div></div>`;
}

function isZoomed(plot) {
  const xs = plot.data[0], { min, max } = plot.scales.x;
  return xs.length > 1 && min !== null && max !== null && (min > xs[0] || max < xs.at(-1));
}

function chartLabel(title, series) {
  const last = series.filter((s) => s.points.length).map((s) => {
    const [x, y] = s.points.at(-1);
    return `${s.name} ${number(y)} at ${number(x)}`;
  });
  return `${title}: ${last.join(", ") || "no values yet"}`;
}

/** Returns uPlot's columns: all x in order, then y of each series, null where it has none. */
export function joined(series) {
  const xs = [...new Set(series.flatMap((s) => s.points.map(([x]) => x)))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  return [xs, ...series.map((s) => {
    const ys = new Array(xs.length).fill(undefined); // uPlot: undefined joins over, null breaks
    for (const [x, y] of s.points) ys[place.get(x)] = Number.isFinite(y) ? y : null;
    return ys;
  })];
}

function chartOptions({ series, unit, group, height, zero, onPick, box }) {
  const [soft, rule] = ["--soft", "--rule"].map(colour);
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const axis = { stroke: soft, font, grid: { stroke: rule, width: 1 }, ticks: { show: false } };
  return {
    width: box.clientWidth || 300, height,
    padding: [10, 14, 0, 0],
    legend: { show: false },
    cursor: { points: { size: 7 }, drag: { x: true, y: false },
      sync: group ? { key: group, setSeries: false } : undefined },
    scales: { x: { time: false }, y: { range: (_, low, high) => yRange(low, high, zero) } },
    axes: [
      { ...axis, grid: { show: false }, size: 28, incrs: WHOLE_STEPS, values: (_, ticks) =>
        ticks.map(tick) },
      { ...axis, size: 52, values: (_, ticks) => ticks.map(tick) },
    ],
    series: [{ label: unit }, ...series.map((s) => ({
      label: s.name, stroke: colour(`--c${s.colour}`), width: s.width ?? 2,
      dash: s.dash ? [3, 4] : undefined, spanGaps: true,
      points: { show: s.points.length < 3, size: 6, fill: colour(`--c${s.colour}`) },
    }))],
    plugins: [tooltip(unit, series, onPick)],
  };
}

function yRange(low, high, zero) {
  if (low === null || low === undefined) return [0, 1];
  const from = zero ? Math.min(0, low) : low;
  const span = (high - from) || Math.abs(high) || 1;
  return [from < 0 || !zero ? from - 0.05 * span : from, high + 0.06 * span];
}

function tick(value) {
  return value === null ? "" : number(value, 3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** A box beside the cursor with the values at it; a click calls `onPick` with x. */
function tooltip(unit, series, onPick) {
  let tip;
  return { hooks: {
    init: (u) => {
      tip = document.createElement("div");
      tip.className = "chart-tip";
      tip.hidden = true;
      u.over.append(tip);
      u.over.addEventListener("mouseleave", () => { tip.hidden = true; });
      if (onPick) u.over.addEventListener("click", () =>
        u.cursor.idx !== null && u.cursor.idx !== undefined && onPick(u.data[0][u.cursor.idx]));
    },
    setCursor: (u) => {
      const { idx, left } = u.cursor;
      if (idx === null || idx === undefined || left < 0) { tip.hidden = true; return; }
      tip.replaceChildren(tipLine(`${unit} ${number(u.data[0][idx], 4)}`, 0),
        ...series.map((s, n) => [s, u.data[n + 1][idx]]).filter(([, y]) => Number.isFinite(y))
          .map(([s, y]) => tipLine(`${s.name}  ${number(y, 4)}`, s.colour)));
      tip.hidden = false;
      const right = left > u.over.clientWidth / 2;
      tip.style.left = right ? "" : `${left + 12}px`;
      tip.style.right = right ? `${u.over.clientWidth - left + 12}px` : "";
    },
  } };
}

function tipLine(text, number) {
  const line = document.createElement("div");
  if (number) line.className = `c${number}`;
  line.textContent = text; // names of runs come from outside: text, never markup
  return line;
}
