// The filters of a search as functions of one row, for exports, where no server searches. The same
// names and bounds as the server's `api/r/{n}/search`.

const RANGES = ["reward", "lag", "tokens", "group_reward"];
const EQUAL = ["task", "finish", "rollout", "step", "group", "version", "ended"];
const AROUND = 40; // characters shown before and after what was found

/** Returns the row if it meets all filters, with `match` for a text that was found; else null. */
export function matches(row, query) {
  for (const name of RANGES) {
    const [low, high] = [query.get(`${name}_min`), query.get(`${name}_max`)];
    if (low === null && high === null) continue;
    if (row[name] === null || row[name] === undefined) return null;
    if ((low !== null && row[name] < Number(low)) || (high !== null
      && row[name] > Number(high))) return null;
  }
  for (const name of EQUAL) {
    if (query.get(name) !== null && String(row[name]) !== query.get(name)) return null;
  }
  if (query.get("name") !== null && !row.trajectory.startsWith(query.get("name"))) return null;
  const { prompt, answer, ...light } = row;
  if (query.get("q") === null) return light;
  const match = found({ prompt, answer }[query.get("in")] ?? (query.get("in") === "all"
    ? `${prompt}${answer}` : answer), query);
  return match && { ...light, match };
}

function found(text, query) {
  if (text === null || text === undefined) return null;
  let at, length;
  if (query.get("mode") === "re") {
    const hit = new RegExp(query.get("q"), "u").exec(text);
    if (!hit) return null;
    [at, length] = [hit.index, hit[0].length];
  } else {
    at = text.toLowerCase().indexOf(query.get("q").toLowerCase());
    if (at < 0) return null;
    length = query.get("q").length;
  }
  return { before: text.slice(Math.max(0, at - AROUND), at), text: text.slice(at, at + length),
    after: text.slice(at + length, at + length + AROUND) };
}

/** The rows in the order of a search. */
export function ordered(rows, order) {
  const [key, sign] = {
    oldest: ["finished_s", 1], reward: ["reward", 1], "-reward": ["reward", -1],
      tokens: ["tokens", 1],
    "-tokens": ["tokens", -1], lag: ["lag", 1], "-lag": ["lag", -1],
  }[order] ?? ["finished_s", -1];
  const value = (row) => row[key] ?? (sign > 0 ? Infinity : -Infinity);
  return rows.toSorted((a, b) => sign * (value(a) - value(b)));
}
