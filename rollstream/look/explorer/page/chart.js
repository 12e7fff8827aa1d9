// A chart that the program drew as SVG: the cursor shows the values of the nearest x, in all charts
// over the same x at once; a click picks that x, a drag a range of it. A reader without a pointer
// finds the last values in the chart's label, and every value in the tables of the steps view.

import { h, html, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { number, percent } from "./format.js";

const DRAG = 6; // pixels; less is a click

export function Chart({ attributes, children, onPick, onZoom }) {
  const box = useRef(null);
  const [at, setAt] = useState(null); // the x under the cursor
  const from = useRef(null); // where a drag began: { x, pixel }; it draws nothing
  const [series, drawn] = useMemo(() => [curves(children), plain(children)], [children]);
  const along = attributes["data-along"];
  useEffect(() => {
    const follow = ({ detail }) => detail.along === along && setAt(detail.x);
    addEventListener("chartcursor", follow);
    return () => removeEventListener("chartcursor", follow);
  }, [along]);
  const point = (x) => dispatchEvent(new CustomEvent("chartcursor", { detail: { x, along } }));
  const picks = onPick && along === "step";
  const pixel = (event) => {
    const { left, width } = box.current.firstChild.getBoundingClientRect();
    return ((event.clientX - left) / width) * Number(attributes.viewBox.split(" ")[2]);
  };
  const nearest = (event) => {
    const px = pixel(event);
    const all = series.flatMap((s) => s.points);
    return all.length ? all.reduce((a, b) => Math.abs(b.px - px) < Math.abs(a.px - px) ? b : a).x
      : null;
  };
  const drop = (event) => {
    const x = nearest(event);
    const begun = from.current;
    from.current = null;
    if (!begun || !picks || x === null) return;
    if (Math.abs(event.clientX - begun.pixel) <= DRAG) onPick(x);
    else if (onZoom && x !== begun.x) onZoom(Math.min(begun.x, x), Math.max(begun.x, x));
  };
  const leave = () => {
    from.current = null;
    point(null);
  };
  const marks = at === null ? [] : cursor(series, at);
  return html`<div class=${`chart-box ${picks ? "picks" : ""}`} ref=${box}
    onPointerMove=${(event) => point(nearest(event))} onPointerLeave=${leave}
    onPointerDown=${(event) => { from.current = { x: nearest(event), pixel: event.clientX }; }}
    onPointerUp=${drop}>${h("svg", attributes, ...drawn, ...marks.map((one) =>
      h("path", { class: `spot c${one.colour}`, d: `M${one.px} ${one.py}h0` })),
      marks.length > 0 && h("path", { class: "cursor", d: `M${marks[0].px} 10V194` }))}${
    marks.length > 0 && html`<${Tip} along=${along} marks=${marks}
      isPercent=${attributes["data-form"] === "%"} />`}</div>`;
}

function Tip({ along, marks, isPercent }) {
  const side = marks[0].px > 300 ? "left" : "right";
  return html`<div class=${`chart-tip ${side}`}><div>${along} ${number(marks[0].x, 4)}</div>${
    marks.map((one) => html`<div class=${`c${one.colour}`}>${one.name}${"  "}${
      isPercent ? percent(one.y, 1) : number(one.y, 4)}</div>`)}</div>`;
}

/** Elements without those of the series' values, which only the cursor needs. */
function plain(children) {
  return children.map((node) => {
    if (typeof node === "string") return node;
    const [tag, { "data-x": x, "data-y": y, ...attributes }, inside] = node;
    return h(tag, attributes, ...plain(inside));
  });
}

/** The series of a chart: name, colour, and its points `{ x, y, px, py }` in SVG units. */
function curves(children) {
  const lines = children.filter((node) => node[1]?.["data-x"]);
  // Areas are drawn from the uppermost on.
  const ordered = lines[0]?.[1].class.startsWith("area") ? lines.toReversed() : lines;
  return ordered.map(([, given]) => {
    const [xs, ys] = ["data-x", "data-y"].map((name) => given[name].split(" ").map(Number));
    const places = given.d.replace(/[MhZ].*?(?=\d)|Z$/g, "").split("L");
    return { name: given["data-name"], colour: /\bc(\d)/.exec(given.class)[1],
      points: xs.map((x, n) => {
        const [px, py] = places[n].split(" ").map(parseFloat);
        return { x, y: ys[n], px, py };
      }) };
  });
}

/** What each series has at x, or nearest to it. */
function cursor(series, x) {
  return series.filter((s) => s.points.length).map(({ name, colour, points }) => ({ name, colour,
    ...points.reduce((a, b) => Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a) }));
}
