"use strict";
// What pages here are made of: numbers as people read them, counters, tables, events, themes. Text is never put in as
// markup.

const MOST_EVENTS = 200;

const byId = (id) => document.getElementById(id);
function make(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// --- numbers

const nf = new Intl.NumberFormat("en");
function count(value) { return value === null ? "-" : value >= 100 || Number.isInteger(value) ? nf.format(Math.round(value)) : value.toFixed(1); }
function bytes(value) {
  if (value === null) return "-";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1000) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}
function seconds(value) {
  if (value === null) return "-";
  if (value === 0) return "0";
  const rounded = (number) => (number < 10 ? number.toPrecision(2) : String(Number(number.toPrecision(2)))); // never 1.2e+2
  if (value < 0.001) return `${rounded(value * 1e6)} µs`;
  return value < 1 ? `${rounded(value * 1e3)} ms` : `${rounded(value)} s`;
}
function percent(value) { return value === null ? "-" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`; }

// `name` alone, or with labels: sums what has them. Counters come as {'name{label="value"}': number}.
function labelsOf(series) {
  const labels = {};
  for (const [, key, value] of series.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[key] = value;
  return labels;
}
function total(counters, name) {
  let sum = 0;
  for (const [series, value] of Object.entries(counters)) if (series === name || series.startsWith(`${name}{`)) sum += value;
  return sum;
}
function byLabel(counters, name, label) {
  const found = {};
  for (const [series, value] of Object.entries(counters)) {
    if (!series.startsWith(`${name}{`)) continue;
    const key = labelsOf(series)[label];
    found[key] = (found[key] || 0) + value;
  }
  return found;
}

// What has grown since the reading before, a node that was restarted counted from zero.
function growth(now, before) {
  const grown = {};
  for (const [series, value] of Object.entries(now)) {
    const less = before && before[series] !== undefined && before[series] <= value ? before[series] : 0;
    grown[series] = value - less;
  }
  return grown;
}
// The time that a part of the calls was below, from the growth of a histogram; null without calls.
function quantile(grown, name, part) {
  const counts = new Map();
  for (const [bound, n] of Object.entries(byLabel(grown, `${name}_bucket`, "le"))) counts.set(bound === "+Inf" ? Infinity : Number(bound), n);
  const bounds = [...counts.keys()].sort((a, b) => a - b);
  const all = bounds.length ? counts.get(Infinity) : 0;
  if (!all) return null;
  let below = 0, from = 0;
  for (const bound of bounds) {
    const n = counts.get(bound);
    if (n >= part * all) return bound === Infinity ? from : from + (bound - from) * ((part * all - below) / (n - below || 1));
    below = n; from = bound;
  }
  return from;
}

// --- tables and events

function fillTable(table, heads, rows, otherwise = "nothing yet") {
  const head = make("tr");
  for (const [text, kind] of heads) { const cell = make("th", text, kind); cell.scope = "col"; head.append(cell); }
  table.replaceChildren(head, ...rows);
  if (!rows.length) { const cell = make("td", otherwise, "none"); cell.colSpan = heads.length; const row = make("tr"); row.append(cell); table.append(row); }
}
function number(value, metric, format = count) {
  const cell = make("td", format(value), "n");
  if (metric) { cell.dataset.metric = metric; cell.dataset.value = value; }
  return cell;
}

function tell(at, text, className) {
  const list = byId("events");
  const item = make("li", undefined, className);
  const time = make("time", new Date(at * 1000).toLocaleTimeString());
  item.append(time, ` ${text}`);
  list.prepend(item);
  while (list.children.length > MOST_EVENTS) list.lastChild.remove();
}
async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

// --- theme: what the system has, until another one is chosen

function use(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "light" : "dark";
  byId("theme").setAttribute("aria-label", `use the ${byId("theme").textContent} theme`);
}
const system = matchMedia("(prefers-color-scheme: dark)");
use(new URLSearchParams(location.search).get("theme") || (system.matches ? "dark" : "light"));
system.addEventListener("change", () => use(system.matches ? "dark" : "light"));
byId("theme").addEventListener("click", () => use(byId("theme").textContent));
