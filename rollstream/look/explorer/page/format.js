// Formats numbers, times and counts. Every number of the page goes through here, so that equal
// things look equal and a missing value is a dash.

const THIN = "\u202f";
export const NONE = "–";

/** An integer with its digits in groups of three. */
export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(Number(value))) return NONE;
  return Math.round(Number(value)).toString().replace(/\B(?=(\d{3})+(?!\d))/g, THIN);
}

/** A number with about `digits` significant digits. */
export function number(value, digits = 3) {
  if (value === null || value === undefined) return NONE;
  const known = Number(value);
  if (!Number.isFinite(known)) return String(value);
  if (Number.isInteger(known) && Math.abs(known) < 1e15) return signed(count(known));
  const size = Math.abs(known);
  if (size >= 1000) return signed(count(known));
  if (size < 1e-4) return signed(known.toExponential(1));
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return signed(known.toFixed(Math.min(decimals, 6)));
}

/** A number with a fixed number of decimals, for columns. */
export function fixed(value, decimals = 2) {
  if (value === null || value === undefined || !Number.isFinite(Number(value))) return NONE;
  return signed(Number(value).toFixed(decimals));
}

export function percent(share, decimals = 0) {
  return share === null || share === undefined || !Number.isFinite(share)
    ? NONE : `${(100 * share).toFixed(decimals)}${THIN}%`;
}

/** A duration: 0.42 s, 12.3 s, 3:05, 2:01:40. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(Number(seconds))) return NONE;
  const s = Number(seconds);
  if (Math.abs(s) < 0.1) return `${number(1000 * s, 2)}${THIN}ms`;
  if (Math.abs(s) < 60) return `${signed(s.toFixed(s < 10 ? 2 : 1))}${THIN}s`;
  return clock(s);
}

/** Seconds as a clock since a begin: 0:07, 12:30, 1:02:03. */
export function clock(seconds) {
  const whole = Math.floor(Math.abs(seconds) + 1e-9);
  const h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60, s = whole % 60;
  const two = (n) => String(n).padStart(2, "0");
  return (seconds < 0 && whole > 0 ? "−" : "") + (h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`);
}

/** A moment in UTC: 2026-11-21 13:33:42.3. */
export function moment(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const date = new Date(1000 * Number(seconds));
  return Number.isNaN(date.getTime()) ? NONE
    : date.toISOString().replace("T", " ").slice(0, 21);
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KB", "MB", "GB", "TB"];
  let size = Number(value), unit = 0;
  while (size >= 1000 && unit < units.length - 1) { size /= 1000; unit += 1; }
  return `${unit ? number(size, 3) : count(size)}${THIN}${units[unit]}`;
}

/** `1 group`, `2 groups`. */
export function plural(value, word) {
  return `${count(value)}${"\u00a0"}${word}${Number(value) === 1 ? "" : "s"}`;
}

function signed(text) {
  return text.replaceAll("-", "−");
}
