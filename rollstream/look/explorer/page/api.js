// Reads the run: from the server's `api/`, from the files of a static export (`static.js`), or from
// the answers inside a report. All answer the same keys in the same shape, so that no view knows
// which one it shows. `useApi` is what views call: it reads again when a living run has changed, and
// keeps the old answer until then.

import { createContext, useContext, useEffect, useState } from "./vendor/preact.js";
import { useLoaded } from "./parts.js";

const source = document.querySelector('meta[name="rollstream-source"]')?.content;
export const isStatic = source !== "server";
const prepared = globalThis.rollstreamAnswers; // of a report
const RETRIES = 4; // after an answer "too many at once"

/** An answer that is an error; `status` is the HTTP status, 0 if no answer came. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The canonical key of a request: path, then parameters by name, empty ones left out. */
export function keyOf(path, query = {}) {
  const kept = Object.entries(query)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([name, value]) => `${name}=${encodeURIComponent(String(value))}`);
  return kept.length ? `${path}?${kept.join("&")}` : path;
}

/** `r/0/groups/7` from its parts, each encoded. */
export function runPath(run, ...parts) {
  return ["r", run, ...parts].map((part) => encodeURIComponent(String(part))).join("/");
}

/** Returns the answer of a request as an object; raises `ApiError`. */
export async function get(path, query, signal) {
  const key = keyOf(path, query);
  if (prepared) return inReport(key);
  if (isStatic) return (await import("./static.js")).answer(key, signal);
  for (let attempt = 0; ; attempt += 1) {
    const response = await reached(key, signal);
    if (response.ok) return response.json();
    if (response.status !== 429 || attempt === RETRIES) throw await failure(response);
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function inReport(key) {
  if (key in prepared) return prepared[key];
  throw new ApiError(404, "This page does not hold it: `rollstream explore` shows the whole run.");
}

/** Whether a view has an answer; only a report lacks some. */
export function hasView(name) {
  const first = `r/0/${{ overview: "sheet", maps: "map/" }[name] ?? name}`;
  return !prepared || Object.keys(prepared).some((key) => key.startsWith(first));
}

async function reached(key, signal) {
  try {
    return await fetch(`api/${key}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer; is `rollstream explore` still running?");
  }
}

async function failure(response) {
  if (response.status === 401) {
    return new ApiError(401, "Open the URL that the server printed: it carries the token.");
  }
  const body = await response.json().catch(() => null);
  return new ApiError(response.status, body?.error?.message ?? `HTTP status ${response.status}`);
}

/** Counts the changes of a run; a view that names the count in its reads follows the run. */
export const Changes = createContext({});

/** Reads `path` and reads it again after each change of the run, unless `still`. */
export function useApi(path, query = {}, { run, still = false } = {}) {
  const changes = useContext(Changes);
  const turn = still ? 0 : changes[run] ?? 0;
  return useLoaded((signal) => get(path, query, signal), [keyOf(path, query), turn]);
}

/**
 * Follows the server's events. Returns `{ changes, latest, connected }`: how often each run has
 * changed, and the newest event of each kind by run.
 */
export function useEvents(runs) {
  const [state, setState] = useState({ changes: {}, latest: {}, connected: false });
  const living = runs?.length > 0 && !isStatic;
  useEffect(() => {
    if (!living) return undefined;
    const events = new EventSource("api/events");
    const first = new Set(); // an event of each kind and run comes on connecting: nothing changed
    const follow = (kind) => (event) => {
      const data = JSON.parse(event.data);
      const isFirst = !first.has(`${kind}${data.run}`) && kind !== "audit";
      first.add(`${kind}${data.run}`);
      setState((old) => ({
        connected: true,
        changes: isFirst ? old.changes
          : { ...old.changes, [data.run]: (old.changes[data.run] ?? 0) + 1 },
        latest: { ...old.latest, [data.run]: { ...old.latest[data.run], [kind]: data } },
      }));
    };
    for (const kind of ["change", "index", "audit"]) events.addEventListener(kind, follow(kind));
    events.onerror = () => setState((old) => ({ ...old, connected: false }));
    return () => events.close();
  }, [living]);
  return state;
}
