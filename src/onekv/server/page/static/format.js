// Numbers for people, and the small parts that several panels are made of.

import { html } from "./vendor/htm-preact.js";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  let unit = 0;
  while (bytes >= 1024 && unit < UNITS.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${UNITS[unit]}`;
}

const grouped = new Intl.NumberFormat("en");

export function count(number) {
  return grouped.format(number);
}

export function many(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

export function seconds(value) {
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 60) return `${Math.round(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

// A colour or another value of the style sheet, which has them for light and dark.
export function styled(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export const dark = matchMedia("(prefers-color-scheme: dark)");

export function ago(value) {
  return value < 1 ? "now" : `${seconds(value)} ago`;
}

export function Share({ parts, total, label }) {
  const width = (value) => ({ width: `${total ? (100 * value) / total : 0}%` });
  return html`
    <div class="bar" role=${label ? "img" : undefined} aria-label=${label} aria-hidden=${label ? undefined : "true"}>
      ${parts.map(([name, value]) => html`<i key=${name} data-colour=${name} style=${width(value)}></i>`)}
    </div>`;
}

// Whose something is, as in the server's answers: { key, own }.
export function Owner({ of }) {
  return of.own ? "yours" : (of.key ?? "a former key");
}

// After the next rendering: focus what `find` gives, if what had it is gone.
export function refocus(find) {
  setTimeout(() => document.activeElement === document.body && find()?.focus({ preventScroll: true }));
}
