// Draws a scene of the swimlanes on a canvas and returns where each thing is, for the pointer. Darker
// (lighter on a dark page) is a newer version, as in the report.

import { clock, count, percent } from "../format.js";
import { colour } from "../theme.js";

const LEFT = 104, RIGHT = 12, TOP = 18, AXIS = 24, GAP = 10;
const TRAINER = 20, ROW = 7, ROWS_MAX = 24, BINS = 36, LANE_MIN = 20;
const SHADES = 10;

/** The height that a scene needs. */
export function heightOf(scene) {
  return TOP + scene.lanes.reduce((sum, lane) => sum + laneHeight(scene, lane) + GAP, 0) + AXIS;
}

function laneHeight(scene, lane) {
  if (lane === "trainer") return TRAINER;
  const rows = Math.min(ROWS_MAX, scene.rows.get(lane) ?? 1);
  return Math.max(scene.bins.length ? BINS : LANE_MIN, rows * rowHeight(scene));
}

function rowHeight(scene) {
  const most = Math.max(1, ...scene.rows.values());
  return Math.max(ROW, Math.min(18, Math.floor(110 / most)));
}

/** The colours of the present theme, asked for once per theme. */
export function palette() {
  const names = ["ink", "soft", "rule", "track", "card", "bad", "c2", "c3", "c4", "c5"];
  const found = Object.fromEntries(names.map((name) => [name, colour(`--${name}`)]));
  found.shades = Array.from({ length: SHADES }, (_, n) => colour(`--v${n}`));
  found.font = getComputedStyle(document.body).fontFamily;
  return found;
}

/** Seconds at a pixel of the canvas, and the other way round. */
export function axisOf(window, width) {
  const across = width - LEFT - RIGHT;
  return {
    x: (time) => LEFT + ((time - window.from) / (window.to - window.from)) * across,
    time: (x) => window.from + ((x - LEFT) / across) * (window.to - window.from),
    share: (pixels) => pixels / across,
  };
}

/** Draws everything; returns spots `{ x, y, w, h, kind, of }` in the order of drawing. */
export function draw(canvas, scene, window, { begin, colours }) {
  const width = canvas.clientWidth, height = heightOf(scene), ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  g.font = `12px ${colours.font}`;
  const axis = axisOf(window, width);
  const spots = [];
  const [oldest, newest] = versionsIn(scene, window);
  const share = (version) => (version - oldest) / (newest - oldest + 1);
  const shade = (version) => version == null ? colours.track
    : colours.shades[Math.max(0, Math.min(SHADES - 1, Math.floor(SHADES * share(version))))];
  const on = { g, scene, window, axis, colours, spots, shade, width, height, begin,
    tops: topsOf(scene) };
  drawAxis(on);
  drawTracks(on);
  clipped(on, () => { drawLanes(on); drawServing(on); drawMoves(on); drawMoments(on); });
  return spots;
}

/** The oldest and the newest version in a window: the shades are spread over these. */
export function versionsIn(scene, { from, to }) {
  const seen = [scene.items, scene.bins, scene.steps].flatMap((list) => list.filter((one) =>
    one.version != null && one.start < to && (one.end ?? to) > from));
  const numbers = seen.flatMap((one) => [one.version, one.last ?? one.version]);
  return numbers.length ? [Math.min(...numbers), Math.max(...numbers)] : [0, 0];
}

function topsOf(scene) {
  const tops = new Map();
  let y = TOP;
  for (const lane of scene.lanes) {
    tops.set(lane, y);
    y += laneHeight(scene, lane) + GAP;
  }
  return tops;
}

function clipped(on, work) {
  const { g, width, height } = on;
  g.save();
  g.beginPath();
  g.rect(LEFT, 0, width - LEFT - RIGHT, height - AXIS);
  g.clip();
  work();
  g.restore();
}

function drawAxis({ g, window, axis, colours, height, width, begin }) {
  const step = niceStep((window.to - window.from) / Math.max(2, (width - LEFT - RIGHT) / 100));
  g.fillStyle = colours.soft;
  g.strokeStyle = colours.rule;
  g.textAlign = "center";
  const first = Math.ceil((window.from - begin) / step);
  for (let n = first; begin + n * step <= window.to; n += 1) {
    const x = Math.round(axis.x(begin + n * step)) + 0.5;
    g.beginPath();
    g.moveTo(x, TOP - 6);
    g.lineTo(x, height - AXIS);
    g.stroke();
    g.fillText(timeWord(n * step, step), x, height - 7);
  }
}

function niceStep(rough) {
  const steps = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
    3600, 7200, 14400, 43200, 86400];
  return steps.find((one) => one >= rough) ?? 86400 * Math.ceil(rough / 86400);
}

function timeWord(seconds, step) {
  if (step >= 1) return clock(seconds);
  const digits = step >= 0.1 ? 1 : step >= 0.01 ? 2 : 3;
  return `${seconds.toFixed(digits)} s`;
}

function drawTracks({ g, scene, colours, tops, width }) {
  for (const lane of scene.lanes) {
    const y = tops.get(lane), h = laneHeight(scene, lane);
    g.fillStyle = colours.track;
    g.fillRect(LEFT, y, width - LEFT - RIGHT, h);
    g.fillStyle = colours.ink;
    g.textAlign = "right";
    g.textBaseline = "middle";
    g.fillText(shortName(lane), LEFT - 10, y + h / 2, LEFT - 14);
    g.textBaseline = "alphabetic";
  }
}

/** Control and direction marks of a name would reorder the canvas's text: they become dots. */
function shortName(name) {
  const plain = [...name].map((c) => (/[\p{C}\u200e\u200f\u2028\u2029]/u.test(c) ? "·" : c));
  return plain.length > 15 ? `${plain.slice(0, 14).join("")}…` : plain.join("");
}

function drawLanes(on) {
  const { scene, tops, shade, axis } = on;
  for (const one of scene.steps) bar(on, one, tops.get("trainer"), TRAINER, shade(one.version), "step");
  for (const one of scene.bins) {
    const most = scene.most.get(one.lane) || 1, whole = laneHeight(scene, one.lane);
    const h = (whole * one.running) / most;
    bar(on, one, tops.get(one.lane) + whole - h, h, shade(one.version), "bin", 0);
  }
  const row = rowHeight(scene);
  for (const one of scene.items) {
    if (one.row >= ROWS_MAX) continue;
    const end = one.end ?? on.window.to, y = tops.get(one.lane) + one.row * row;
    bar(on, { ...one, end }, y, row - 1, shade(one.version), "trajectory", 0.5, one);
    if (one.last != null && one.last !== one.version && !scene.decodes.length) {
      const half = axis.x((one.start + end) / 2), last = axis.x(end);
      on.g.fillStyle = shade(one.last);
      on.g.fillRect(half, y, Math.max(0, last - half - 0.5), row - 1);
    }
    if (one.finish === "dead") {
      on.g.fillStyle = on.colours.bad;
      on.g.fillRect(axis.x(end) - 3, y, 3, row - 1);
    }
  }
  for (const one of scene.decodes) {
    if (one.row < ROWS_MAX) bar(on, one, tops.get(one.lane) + one.row * row, row - 1, shade(one.version), "decode", 0.5);
  }
}

function bar({ g, axis, spots, width }, one, y, h, fill, kind, gap = 0.5, of = one) {
  const x = Math.max(LEFT - 1, axis.x(one.start)), end = Math.min(width - RIGHT + 1, axis.x(one.end));
  if (end < LEFT || x > width - RIGHT || y === undefined) return;
  const w = Math.max(1, end - x - gap);
  g.fillStyle = fill;
  g.fillRect(x, y, w, h);
  spots.push({ x, y, w: Math.max(3, w), h, kind, of });
}

/** A tick above the lane where the rollout took other weights. */
function drawServing({ g, scene, axis, colours, tops, spots }) {
  g.fillStyle = colours.c3;
  for (const one of scene.serving) {
    const x = axis.x(one.time), y = tops.get(one.lane);
    if (y === undefined) continue;
    g.beginPath();
    g.moveTo(x - 4, y - 7);
    g.lineTo(x + 4, y - 7);
    g.lineTo(x, y - 1);
    g.fill();
    spots.push({ x: x - 4, y: y - 8, w: 8, h: 8, kind: "serving", of: one });
  }
}

function drawMoves({ g, scene, axis, colours, tops, spots }) {
  g.strokeStyle = g.fillStyle = colours.c2;
  g.lineWidth = 1.6;
  for (const one of scene.moves) {
    if (!tops.has(one.source) || !tops.has(one.destination)) continue;
    const x = axis.x(one.time), down = tops.get(one.destination) > tops.get(one.source);
    const from = tops.get(one.source) + (down ? laneHeight(scene, one.source) : 0);
    const to = tops.get(one.destination) + (down ? 0 : laneHeight(scene, one.destination));
    const tip = down ? -7 : 7;
    g.beginPath();
    g.moveTo(x, from);
    g.lineTo(x, to + tip);
    g.stroke();
    g.beginPath();
    g.moveTo(x - 4, to + tip);
    g.lineTo(x + 4, to + tip);
    g.lineTo(x, to);
    g.fill();
    spots.push({ x: x - 4, y: Math.min(from, to), w: 8, h: Math.abs(to - from), kind: "move",
      of: one });
  }
  g.lineWidth = 1;
}

/** Kills, new terms and fences, as lines over all lanes. */
function drawMoments(on) {
  for (const one of on.scene.fences) line(on, one, "fence", on.colours.c4, [1, 4]);
  for (const one of on.scene.terms) line(on, one, "term", on.colours.c4, [5, 3]);
  for (const one of on.scene.kills) line(on, one, "kill", on.colours.bad, []);
}

function line({ g, axis, height, spots }, one, kind, stroke, dash) {
  const x = axis.x(one.time);
  g.strokeStyle = g.fillStyle = stroke;
  g.setLineDash(dash);
  g.lineWidth = 1.5;
  g.beginPath();
  g.moveTo(x, 4);
  g.lineTo(x, height - AXIS);
  g.stroke();
  g.setLineDash([]);
  g.lineWidth = 1;
  if (kind === "kill") {
    g.font = `600 13px ${g.font.split("px ")[1]}`;
    g.textAlign = "center";
    g.fillText("✕", x, 11);
    g.font = `12px ${g.font.split("px ")[1]}`;
  }
  spots.push({ x: x - 4, y: 0, w: 8, h: 18, kind, of: one }, { x: x - 2, y: 0, w: 4,
    h: height, kind, of: one, weak: true });
}

/** What is under a pixel: the thing that was drawn last there. */
export function spotAt(spots, x, y) {
  const hit = (s) => x >= s.x && x <= s.x + s.w && y >= s.y - 1 && y <= s.y + s.h + 1;
  return spots.findLast((s) => !s.weak && hit(s)) ?? spots.findLast(hit);
}

/** The lines of the tooltip for a spot. */
export function words({ kind, of }, begin) {
  const at = (time) => `at ${clock(time - begin)}`;
  const span = `${clock(of.start - begin)} to ${of.end == null ? "now" : clock(of.end - begin)}`;
  const versions = of.last != null && of.last !== of.version ? `v${of.version} → v${of.last}`
    : `v${of.version}`;
  return {
    step: () => [`step ${of.step}`, `makes v${of.version}, ${span}`],
    bin: () => of.finished == null ? [`${of.lane} decodes ${percent(of.running)} of the time`,
      `under v${of.version}, ${span}`] : [`${of.lane}: ${of.running.toFixed(1)} running`, `${count(of.finished)} finished, newest v${of.version}`],
    trajectory: () => [`trajectory ${of.trajectory}`, `${versions}, ${count(of.tokens)} tokens, ${of.finish ?? "running"}`,
      `${span}${of.attempt > 1 ? `, attempt ${of.attempt}` : ""}`],
    decode: () => [`trajectory ${of.trajectory}`, `tokens ${of.first} to ${of.next} under v${of.version}`, span],
    serving: () => [`${of.lane} takes ${of.version == null ? "a version" : `v${of.version}`}`, at(of.time)],
    move: () => [`${of.source} hands ${of.requests ?? "requests"} to ${of.destination}`, at(of.time)],
    kill: () => [`${of.role} was killed${of.code == null ? "" : ` (${of.code})`}`, at(of.time)],
    term: () => [`${of.role} opens term ${of.term}`, at(of.time)],
    fence: () => [`${of.role} term ${of.term} fences ${of.topic}`, at(of.time)],
  }[kind]();
}
