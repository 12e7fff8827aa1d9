// Light and dark. The page follows the system until a person chooses; the choice stays in this
// browser. Canvases ask `colour` for a CSS variable and draw again when `useTheme` changes.

import { useEffect, useState } from "./vendor/preact.js";

const KEY = "rollstream-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage is switched off: the system decides
  }
}

export function presentTheme() {
  return document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
}

export function startTheme() {
  const chosen = stored();
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  dark.addEventListener("change", () => dispatchEvent(new Event("themechange")));
}

export function toggleTheme() {
  const next = presentTheme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // without storage the choice lasts as long as the page
  }
  dispatchEvent(new Event("themechange"));
}

export function useTheme() {
  const [theme, setTheme] = useState(presentTheme);
  useEffect(() => {
    const follow = () => setTheme(presentTheme());
    addEventListener("themechange", follow);
    return () => removeEventListener("themechange", follow);
  }, []);
  return theme;
}

/** The present colour of a CSS variable as rgb, e.g. `colour("--c1")`, for a canvas. */
export function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`; // resolves light-dark(), which a variable alone does not
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
