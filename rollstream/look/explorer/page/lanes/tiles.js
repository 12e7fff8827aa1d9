// The swimlanes' data: which tiles of time cover a window, and their contents as one list of things
// to draw. Pure functions of values; times are seconds since the epoch.

const Z_MIN = -6, Z_MAX = 30;
export const WINDOW_MIN_S = 0.02; // one decode step of a small model

/** The tiles that cover a window: two or three, `{ z, i }`. */
export function tilesOf(from, to, coarser = 0) {
  const exact = Math.ceil(Math.log2(Math.max(to - from, WINDOW_MIN_S) / 2)) + coarser;
  const z = Math.max(Z_MIN, Math.min(Z_MAX, exact));
  const width = 2 ** z;
  const tiles = [];
  for (let i = Math.floor(from / width); i * width < to; i += 1) tiles.push({ z, i });
  return tiles;
}

/** A window moved by `share` of its width, or scaled by `factor` around `centre`. */
export function moved({ from, to }, share) {
  const by = share * (to - from);
  return { from: from + by, to: to + by };
}

export function scaled({ from, to }, factor, centre = (from + to) / 2) {
  const width = Math.max(WINDOW_MIN_S, (to - from) * factor);
  const share = (centre - from) / (to - from);
  return { from: centre - share * width, to: centre + (1 - share) * width };
}

/** Keeps a window within the run, with a small margin at both ends. */
export function within(window, [begin, end]) {
  const margin = 0.02 * Math.max(end - begin, WINDOW_MIN_S);
  const [low, high] = [begin - margin, end + margin];
  const width = Math.min(window.to - window.from, high - low);
  const from = Math.max(low, Math.min(window.from, high - width));
  return { from, to: from + width };
}

/**
 * Joins tiles into one scene. Lanes are named; what several tiles hold is there once. `rows` of a
 * lane is how many trajectories ran in it at once.
 */
export function sceneOf(tiles) {
  const lanes = [];
  const scene = { lanes, items: [], bins: [], steps: [], serving: [], moves: [], kills: [],
    terms: [], fences: [], decodes: [], cut: {} };
  const seen = new Set();
  const once = (list, key, value) => {
    if (seen.has(key)) return;
    seen.add(key);
    list.push(value);
  };
  for (const tile of tiles) {
    for (const name of tile.lanes) if (!lanes.includes(name)) lanes.push(name);
    const name = (n) => tile.lanes[n];
    for (const one of tile.items ?? []) once(scene.items, `i${name(one[0])}/${one[5]}/${one[7]}`, {
      lane: name(one[0]), start: one[1], end: one[2], version: one[3], last: one[4],
      trajectory: one[5], finish: one[6], attempt: one[7], tokens: one[8] });
    for (const [lane, bin, running, version, finished] of tile.bins?.cells ?? []) {
      const width = (tile.to_s - tile.from_s) / tile.bins.count;
      scene.bins.push({ lane: name(lane), start: tile.from_s + bin * width,
        end: tile.from_s + (bin + 1) * width, running, version, finished });
    }
    for (const [start, end, step, version] of tile.steps ?? []) once(scene.steps, `s${step}/${start}`, { start, end, step, version });
    for (const [lane, time, version, term] of tile.serving ?? []) once(scene.serving, `v${lane}/${time}`, { lane: name(lane), time, version, term });
    for (const [time, source, destination, requests] of tile.moves ?? []) once(scene.moves,
      `m${time}/${name(source)}/${name(destination)}`, { time, source: name(source),
        destination: name(destination), requests });
    for (const [time, role, code] of tile.kills ?? []) once(scene.kills, `k${time}/${role}`,
      { time, role, code });
    for (const [time, role, term] of tile.terms ?? []) once(scene.terms, `t${time}/${role}`,
      { time, role, term });
    for (const [time, role, term, topic] of tile.fences ?? []) once(scene.fences, `f${time}/${role}/${topic}`, { time, role, term, topic });
    for (const [lane, trajectory, start, end, first, next, version] of tile.decodes ?? []) once(scene.decodes,
      `d${trajectory}/${first}/${start}`, {
        lane: name(lane), trajectory, start, end, first, next, version });
    for (const [kind, n] of Object.entries(tile.cut ?? {})) scene.cut[kind] = Math.max(scene.cut[kind] ?? 0, n);
  }
  return packed(scene);
}

/** Gives each trajectory the first row of its lane that is free when it starts. */
function packed(scene) {
  const ends = new Map(scene.lanes.map((lane) => [lane, []]));
  const rowOf = new Map();
  for (const item of scene.items.sort((a, b) => a.start - b.start
    || (a.trajectory < b.trajectory ? -1 : 1))) {
    const rows = ends.get(item.lane) ?? [];
    let row = rows.findIndex((end) => end <= item.start);
    if (row < 0) row = rows.length;
    rows[row] = item.end ?? Infinity;
    item.row = row;
    rowOf.set(`${item.lane}/${item.trajectory}`, row);
  }
  for (const one of scene.decodes) one.row = rowOf.get(`${one.lane}/${one.trajectory}`) ?? 0;
  const rows = new Map([...ends].map(([lane, list]) => [lane, list.length]));
  const most = new Map();
  for (const bin of scene.bins) most.set(bin.lane, Math.max(most.get(bin.lane) ?? 0, bin.running));
  return { ...scene, rows, most };
}
