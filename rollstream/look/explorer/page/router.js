// Keeps the view in the address: `#/trajectory/136.3?by=lag`. A link sent to a colleague opens the
// same view of the same thing. Views read `route` and change it only through `go` and `adjust`.

import { useEffect, useState } from "./vendor/preact.js";

/** Returns the route of a fragment: its name, the parts of its path and its parameters. */
export function parseRoute(fragment) {
  const [path, query = ""] = fragment.replace(/^#\/?/, "").split("?", 2);
  const [name, ...parts] = path.split("/").filter(Boolean).map(decoded);
  return { name: name ?? "overview", parts, query: new URLSearchParams(query) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a damaged link is shown as it is
  }
}

/** Returns the fragment of a route; `query` may hold null for parameters to leave out. */
export function link(name, parts = [], query = {}) {
  const path = [name, ...[parts].flat()].map((part) => encodeURIComponent(String(part))).join("/");
  const kept = Object.entries(query).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const text = new URLSearchParams(kept.map(([k, v]) => [k, String(v)])).toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

/** Opens another view; the browser's back button returns. */
export function go(...route) {
  location.hash = link(...route);
}

/** Changes parameters of the present view in place, without a new entry in the history. */
export function adjust(changes) {
  const { name, parts, query } = parseRoute(location.hash);
  const next = { ...Object.fromEntries(query), ...changes };
  history.replaceState(null, "", link(name, parts, next));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute() {
  const [route, setRoute] = useState(() => parseRoute(location.hash));
  useEffect(() => {
    const follow = () => setRoute(parseRoute(location.hash));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return route;
}
