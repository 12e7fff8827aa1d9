// How tokens are coloured. A measure maps each token to a class of the ramps in `styles.css`, and
// has a legend. q0…q8 is a ramp from pale to strong, l4…l1 and r1…r4 diverge from nothing.

import { count, fixed, number, percent } from "./format.js";

const STEPS = 9;

/** The class of a share from 0 to 1 on a ramp. */
export function rampClass(share) {
  return `q${Math.max(0, Math.min(STEPS - 1, Math.floor(share * STEPS)))}`;
}

/** The class of a value from −most to +most; none near zero. */
function divergingClass(value, most) {
  const place = Math.round((4 * value) / (most || 1));
  if (place === 0 || !Number.isFinite(place)) return "";
  return place < 0 ? `l${Math.min(4, -place)}` : `r${Math.min(4, place)}`;
}

/** Measures that the answer about a trajectory has values for, in the order of their buttons. */
export function measuresOf(data) {
  const t = data.tokens;
  const known = (values) => Array.isArray(values) && values.some((v) => v !== null);
  const found = [versionMeasure(data)];
  if (known(t.lag)) found.push(rangeMeasure("lag", "lag", t.lag, "orange", "steps", { from: 0,
    digits: count }));
  if (known(t.logprob)) found.push(surpriseMeasure(t.logprob));
  if (known(t.entropy)) found.push(entropyMeasure(t.entropy));
  if (known(t.mismatch)) found.push(gapMeasure("mismatch", t.mismatch, MISMATCH_LEAST));
  if (known(t.accepted)) found.push(flagMeasure("draft", "draft", t.accepted, "teal",
    "accepted draft token", "sampled by the model"));
  if (t.advantage !== null && t.advantage !== undefined) found.push(advantageMeasure(t));
  if (known(t.mask)) found.push(flagMeasure("mask", "mask", t.mask, "blue", "trained", "masked"));
  for (const [name, values] of Object.entries(t.strips ?? {})) {
    found.push(stripMeasure(name, values));
    if (known(t.logprob) && /logprob/.test(name)) found.push(mismatchMeasure(name, values, t.logprob));
  }
  return found;
}

/** Versions from the trajectory's oldest (pale) to its newest (strong). */
function versionMeasure(data) {
  const order = [...new Set(data.versions.map((v) => v.version))].toSorted((a, b) => a - b);
  const share = (version) => order.length < 2 ? 0.45
    : 0.12 + (0.87 * order.indexOf(version)) / (order.length - 1);
  return {
    key: "version", label: "version", ramp: "blue",
    cls: (n) => data.tokens.version[n] === null ? "" : rampClass(share(data.tokens.version[n])),
    items: order.slice(-24).map((v) => ({ name: `v${v}`, cls: rampClass(share(v)),
      note: `${count(sum(data.versions, v))} tokens` })),
  };
}

function sum(spans, version) {
  return spans.filter((s) => s.version === version).reduce((all, s) => all + s.tokens, 0);
}

/** Log-probability as surprise: the likelier a token was, the paler; certain ones stay bare. */
function surpriseMeasure(values) {
  const most = 5; // e^-5 is a probability below 1 %
  return {
    key: "logprob", label: "log-probability", ramp: "orange",
    cls: (n) => values[n] === null ? "" : -values[n] < 0.02 ? "" : rampClass(-values[n] / most),
    scale: ["likely, 100\u202f%", "below 1\u202f%"],
  };
}

function rangeMeasure(key, label, values, ramp, unit, { from, digits = number } = {}) {
  const present = values.filter((v) => v !== null);
  const low = from ?? Math.min(...present), high = Math.max(...present);
  return {
    key, label, ramp,
    cls: (n) => values[n] === null ? "" : rampClass((values[n] - low) / ((high - low) * 1.001
      || 1)),
    scale: [`${digits(low)}${unit && ` ${unit}`}`, digits(high)],
  };
}

function stripMeasure(name, values) {
  const measure = rangeMeasure(name, name.replaceAll("_", " "), values, "violet", "");
  return { ...measure, ramp: /entropy/.test(name) ? "teal" : "violet" };
}

/** The entropy of the distribution that a token was drawn from, in nats: pale where it was sure. */
function entropyMeasure(values) {
  const most = Math.max(1, ...values.filter((v) => v !== null));
  return { key: "entropy", label: "entropy", ramp: "teal",
    cls: (n) => values[n] === null || values[n] < 0.01 ? "" : rampClass(values[n] / (most * 1.001)),
    scale: ["sure, 0 nats", `${number(most)} nats`] };
}

const MISMATCH_LEAST = 1e-4; // a scale that ends below it would colour float32's rounding

/** A reference's log-probability minus the engine's. */
function mismatchMeasure(name, values, logprobs) {
  const gap = values.map((v, n) => (v === null || logprobs[n] === null ? null : v - logprobs[n]));
  return { ...gapMeasure(`${name}-mismatch`, gap, 0.05), label: `${name.replaceAll("_", " ")} gap` };
}

/** A log-probability minus the engine's, from below it to above. */
function gapMeasure(key, gap, least) {
  const most = Math.max(least, ...gap.filter((g) => g !== null).map(Math.abs));
  return { key, label: "mismatch", ramp: "blue", diverging: true,
    cls: (n) => gap[n] === null ? "" : divergingClass(gap[n], most),
    scale: [`−${number(most, 2)} below the engine`, `+${number(most, 2)} above`] };
}

function advantageMeasure(t) {
  const most = Math.max(2, Math.abs(t.advantage));
  return { key: "advantage", label: "advantage", ramp: "blue", diverging: true,
    cls: (n) => t.logprob[n] === null || t.mask?.[n] === 0 ? "" : divergingClass(t.advantage, most),
    scale: [`−${fixed(most, 1)} less likely`, `+${fixed(most, 1)} more likely`] };
}

function flagMeasure(key, label, values, ramp, yes, no) {
  const known = values.filter((v) => v !== null);
  const marked = known.filter(Boolean).length;
  return { key, label, ramp,
    cls: (n) => values[n] === null ? "" : values[n] ? "q5" : "q0",
    items: [{ name: yes, cls: "q5", note: `${count(marked)} · ${percent(marked / known.length)}` },
      { name: no, cls: "q0", note: count(known.length - marked) }] };
}

/** Classes of the steps of a ramp, for its legend. */
export function legendSteps(measure) {
  return measure.diverging ? ["l4", "l3", "l2", "l1", "", "r1", "r2", "r3", "r4"]
    : Array.from({ length: STEPS }, (_, n) => `q${n}`);
}
