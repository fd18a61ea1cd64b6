"use strict";
// Asks the router for its metrics and its instances every two seconds, and shows what it says.

const EVERY_MS = 2000;
const SECONDS = 300;
const readings = []; // of the last SECONDS: {at, counters, told}

function counters(text) {
  const found = {};
  for (const line of text.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const end = line.lastIndexOf(" ");
    found[line.slice(0, end)] = Number(line.slice(end + 1));
  }
  return found;
}

// --- what is shown

function graphs() {
  const times = readings.map((reading) => reading.at);
  const rows = readings.map((now, i) => (i ? { grown: growth(now.counters, readings[i - 1].counters), seconds: Math.max(0.001, now.at - readings[i - 1].at) } : null));
  const line = (value) => rows.map((row) => (row ? value(row) : null));
  const span = Math.min(SECONDS, Math.max(60, times[times.length - 1] - times[0]));
  const last = readings[readings.length - 1];
  const ended = {};
  for (const [outcome, n] of Object.entries(byLabel(last.counters, "p2pkv_proxy_requests_total", "outcome"))) {
    if (n || outcome === "ok") ended[outcome] = line((row) => (byLabel(row.grown, "p2pkv_proxy_requests_total", "outcome")[outcome] || 0) / row.seconds);
  }
  drawChart(byId("g-requests"), times, ended, { format: count, seconds: span });
  for (const [id, name] of [["g-first", "p2pkv_proxy_first_byte_seconds"], ["g-whole", "p2pkv_proxy_request_seconds"]]) {
    const lines = {};
    for (const [label, part] of [["p50", 0.5], ["p90", 0.9], ["p99", 0.99]]) lines[label] = line((row) => quantile(row.grown, name, part));
    drawChart(byId(id), times, lines, { format: seconds, seconds: span });
  }
  const tokens = {};
  const busiest = Object.entries(byLabel(last.counters, "p2pkv_proxy_instance_tokens", "instance")).sort((a, b) => b[1] - a[1]).slice(0, 6);
  for (const [instance] of busiest) tokens[instance] = readings.map((reading) => byLabel(reading.counters, "p2pkv_proxy_instance_tokens", "instance")[instance] ?? null);
  drawChart(byId("g-tokens"), times, tokens, { format: count, seconds: span });
  return rows[rows.length - 1];
}

function tiles(reading, row) {
  const { counters: now, told } = reading;
  const ready = told.instances.filter((one) => one.state === "ready" && one.breaker === "closed").length;
  const ended = row ? total(row.grown, "p2pkv_proxy_requests_total") : 0;
  const ok = row ? byLabel(row.grown, "p2pkv_proxy_requests_total", "outcome").ok || 0 : 0;
  const items = [
    ["instances ready", `${ready} of ${told.instances.length}`],
    ["requests under way", count(total(now, "p2pkv_proxy_instance_requests"))],
    ["tokens in flight", count(total(now, "p2pkv_proxy_instance_tokens"))],
    ["requests", row ? `${count(ended / row.seconds)}/s` : "-"],
    ["ended well", ended ? percent(ok / ended) : "-"],
    ["first byte p50", row ? seconds(quantile(row.grown, "p2pkv_proxy_first_byte_seconds", 0.5)) : "-"],
    ["first byte p99", row ? seconds(quantile(row.grown, "p2pkv_proxy_first_byte_seconds", 0.99)) : "-"],
    ["longest queue", seconds(Math.max(0, ...Object.values(byLabel(now, "p2pkv_proxy_instance_queue_seconds", "instance"))))],
    ["other routers", count(told.n_replicas)],
  ];
  byId("tiles").replaceChildren(...items.map(([what, value]) => {
    const item = make("div");
    item.append(make("dt", what), make("dd", value));
    return item;
  }));
}

// Says what is wrong with an instance; nothing if it is well.
function troubles(one) {
  if (one.breaker !== "closed") return "requests to it fail, so it is left alone for a while";
  if (one.state === "failing") return "its health check fails";
  if (one.state === "draining") return "it finishes what it has and gets nothing new";
  if (one.state === "starting") return "it is not ready yet";
  if (one.state === "left") return "it said good-bye";
  if (one.capacity && one.in_flight + one.replica_requests >= one.capacity) return "it has as many requests as it may";
  return "";
}
const SHOWN = ["requests", "tokens", "waiting_requests", "queue_seconds", "replica_requests", "replica_tokens"];
function instances({ counters: now, told }) {
  const heads = [["instance"], ["role"], ["state"], ["why"], ["requests", "n"], ["tokens", "n"], ["waiting", "n"], ["queue", "n"], ["others' requests", "n"], ["others' tokens", "n"], ["reported", "n"], ["KV"], ["served", "n"], ["model"], ["address"]];
  const rows = told.instances.map((one) => {
    const row = make("tr");
    row.dataset.instance = one.id;
    const why = troubles(one);
    row.append(make("td", one.id), make("td", one.role), make("td", one.breaker === "closed" ? one.state : `${one.state}, breaker ${one.breaker}`, one.state === "ready" ? (why ? "warn" : "good") : ["draining", "starting"].includes(one.state) ? "warn" : "bad"), make("td", why, "why"));
    for (const what of SHOWN) {
      const metric = `p2pkv_proxy_instance_${what}`;
      row.append(number(byLabel(now, metric, "instance")[one.id] ?? null, metric, what === "queue_seconds" ? seconds : count));
    }
    row.append(number(one.reported));
    const kv = make("td", one.kv_capacity ? "" : "-");
    if (one.kv_capacity) {
      const meter = make("meter");
      meter.max = one.kv_capacity; meter.value = one.kv_tokens;
      meter.title = `${count(one.kv_tokens)} of ${count(one.kv_capacity)} tokens`;
      kv.append(meter);
    }
    row.append(kv, number(one.served), make("td", one.model), make("td", one.url));
    return row;
  });
  fillTable(byId("instances"), heads, rows);
}

function plain(cells) {
  const row = make("tr");
  row.append(...cells.map((cell) => (cell instanceof Node ? cell : make("td", cell))));
  return row;
}
function gone({ told }) {
  const rows = [...told.gone].reverse().map((one) => plain([new Date(one.at * 1000).toLocaleTimeString(), one.id, one.role, make("td", one.why, "why"), number(one.served), one.url]));
  fillTable(byId("gone"), [["at"], ["instance"], ["role"], ["why"], ["served", "n"], ["address"]], rows);
}
function counted(now, name, labels) {
  const found = [];
  for (const [series, value] of Object.entries(now)) {
    if (!series.startsWith(`${name}{`) || !value) continue;
    const has = labelsOf(series);
    found.push([value, plain([...labels.map((label) => has[label] || "none"), number(value, series)])]);
  }
  return found.sort((a, b) => b[0] - a[0]).slice(0, 200).map(([, row]) => row);
}
function choices({ counters: now }) {
  fillTable(byId("pairs"), [["prefill"], ["decode"], ["requests", "n"]], counted(now, "p2pkv_proxy_pairs_total", ["prefill", "decode"]));
  const rows = [...counted(now, "p2pkv_proxy_choices_total", ["reason"]), ...counted(now, "p2pkv_proxy_requests_total", ["outcome"])];
  fillTable(byId("reasons"), [["reason: prefill/decode, or outcome"], ["requests", "n"]], rows);
}
function replicas({ told }) {
  const rows = told.replicas.map((one) => plain([one.name, one.address, number(one.heard_seconds_ago, "", seconds), number(one.requests), number(one.tokens)]));
  fillTable(byId("replicas"), [["router"], ["address"], ["heard", "n"], ["requests", "n"], ["tokens", "n"]], rows);
}

// --- events: what the router remembers, and what its counters say besides

const NOTABLE = {
  p2pkv_proxy_instance_opened_breakers_total: "an instance failed so often that it is left alone", p2pkv_proxy_refused_strangers_total: "a connection with another secret was refused",
  p2pkv_proxy_dropped_log_lines_total: "lines of the access log were lost",
};
let toldUntil = 0;
function events(reading, before) {
  for (const event of reading.told.events) {
    if (event.at <= toldUntil) continue;
    tell(event.at, `${event.instance}: ${event.text}`, /is gone|failing/.test(event.text) ? "bad" : /ready|is there/.test(event.text) ? "good" : "");
    toldUntil = event.at;
  }
  if (!before) return;
  const grown = growth(reading.counters, before.counters);
  for (const [metric, what] of Object.entries(NOTABLE)) if (total(grown, metric)) tell(reading.at, `${what} (${count(total(grown, metric))})`, "warn");
  const change = reading.told.n_replicas - before.told.n_replicas;
  if (change) tell(reading.at, `${Math.abs(change)} other routers ${change > 0 ? "have come" : "are gone"}`, change > 0 ? "good" : "warn");
}

async function turn() {
  try {
    const [page, told] = await Promise.all([fetch("metrics", { cache: "no-store" }), ask("router.json")]);
    if (!page.ok) throw new Error((await page.text()).trim());
    const reading = { at: told.at, counters: counters(await page.text()), told };
    const before = readings[readings.length - 1];
    if (!before || reading.at > before.at) {
      readings.push(reading);
      while (readings[0].at < reading.at - SECONDS) readings.shift();
      byId("where").textContent = `${location.host}${told.workers > 1 ? `, one of ${told.workers} workers` : ""}`;
      tiles(reading, graphs());
      instances(reading);
      gone(reading);
      choices(reading);
      replicas(reading);
      events(reading, before);
    }
    byId("state").textContent = `read at ${new Date(told.at * 1000).toLocaleTimeString()}`;
    byId("state").className = "";
  } catch (error) {
    byId("state").textContent = `the router does not answer: ${error.message}; asking again`;
    byId("state").className = "bad";
  }
  setTimeout(turn, EVERY_MS);
}
turn();
