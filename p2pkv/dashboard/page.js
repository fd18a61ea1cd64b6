"use strict";
// Asks the node for the whole cluster every two seconds, and shows what it says. Text is never put in as markup.

const EVERY_MS = 2000;
const SECONDS = 300;
const readings = []; // of the last SECONDS: {at, nodes: Map of node id to {member, counters}}

const params = new URLSearchParams(location.search);

function grownOf(now, before, nodeId) {
  const node = now.nodes.get(nodeId);
  const earlier = before && before.nodes.get(nodeId);
  if (!node.counters || !earlier || !earlier.counters) return null;
  const isSame = earlier.member.boot_epoch === node.member.boot_epoch;
  return growth(node.counters, isSame ? earlier.counters : null);
}

// --- what is shown

const TIERS = { own_pool: "own pool", disk: "own disk" };
function graphs() {
  const times = readings.map((reading) => reading.at);
  const rows = readings.map((now, i) => {
    if (!i) return null;
    const before = readings[i - 1];
    const sum = {};
    for (const nodeId of now.nodes.keys()) {
      for (const [series, value] of Object.entries(grownOf(now, before, nodeId) || {})) sum[series] = (sum[series] || 0) + value;
    }
    return { grown: sum, seconds: Math.max(0.001, now.at - before.at) };
  });
  const line = (value) => rows.map((row) => (row ? value(row) : null));
  const sources = new Set(rows.flatMap((row) => (row ? Object.keys(byLabel(row.grown, "p2pkv_fetched_bytes_total", "source")) : [])));
  const sent = {}, hits = {};
  const asked = (grown) => total(grown, "p2pkv_fetched_pages_total") + total(grown, "p2pkv_missed_pages_total");
  for (const source of [...sources].sort()) {
    sent[TIERS[source] || source] = line((row) => (byLabel(row.grown, "p2pkv_fetched_bytes_total", "source")[source] || 0) / row.seconds);
    hits[TIERS[source] || source] = line((row) => (asked(row.grown) ? (byLabel(row.grown, "p2pkv_fetched_pages_total", "source")[source] || 0) / asked(row.grown) : null));
  }
  hits.missed = line((row) => (asked(row.grown) ? total(row.grown, "p2pkv_missed_pages_total") / asked(row.grown) : null));
  const span = Math.min(SECONDS, Math.max(60, times[times.length - 1] - times[0]));
  drawChart(byId("g-bytes"), times, sent, { format: bytes, seconds: span, isBytes: true });
  drawChart(byId("g-hits"), times, hits, { format: percent, seconds: span });
  for (const [id, name] of [["g-fetch", "p2pkv_fetch_seconds"], ["g-publish", "p2pkv_publish_seconds"]]) {
    const lines = {};
    for (const [label, part] of [["p50", 0.5], ["p90", 0.9], ["p99", 0.99]]) lines[label] = line((row) => quantile(row.grown, name, part));
    drawChart(byId(id), times, lines, { format: seconds, seconds: span });
  }
  return rows[rows.length - 1];
}

function tiles(reading, row) {
  const members = [...reading.nodes.values()];
  const sum = (name) => members.reduce((all, node) => all + (node.counters ? total(node.counters, name) : 0), 0);
  const most = (name) => Math.max(0, ...members.map((node) => (node.counters ? total(node.counters, name) : 0)));
  const grown = (name) => (row ? total(row.grown, name) : null);
  const hits = grown("p2pkv_fetched_pages_total"), missed = grown("p2pkv_missed_pages_total");
  const alive = members.filter((node) => ["ALIVE", "DRAINING"].includes(node.member.state)).length;
  const items = [
    ["members alive", `${alive} of ${members.length}`],
    ["fetched", row ? `${bytes(grown("p2pkv_fetched_bytes_total") / row.seconds)}/s` : "-"],
    // attached engines are no members: their pages are counted by the nodes that store them
    ["published", row ? `${bytes((grown("p2pkv_published_bytes_total") + grown("p2pkv_attach_stored_bytes_total")) / row.seconds)}/s` : "-"],
    ["hit rate", hits + missed ? percent(hits / (hits + missed)) : "-"],
    ["hit rate since start, and at most", most("p2pkv_cluster_hit_rate_ceiling_ratio") ? `${percent(most("p2pkv_cluster_hit_rate_ratio"))} of ${percent(most("p2pkv_cluster_hit_rate_ceiling_ratio"))}` : "-"],
    ["fetch p50", row ? seconds(quantile(row.grown, "p2pkv_fetch_seconds", 0.5)) : "-"],
    ["fetch p99", row ? seconds(quantile(row.grown, "p2pkv_fetch_seconds", 0.99)) : "-"],
    ["pools", `${bytes(sum("p2pkv_pool_used_bytes"))} of ${bytes(sum("p2pkv_pool_capacity_bytes"))}`],
    ["disks", `${bytes(sum("p2pkv_disk_used_bytes"))} of ${bytes(sum("p2pkv_disk_capacity_bytes"))}`],
    ["pages in pools", count(sum("p2pkv_pool_pages"))],
  ];
  byId("tiles").replaceChildren(...items.map(([what, value]) => {
    const item = make("div");
    item.append(make("dt", what), make("dd", value));
    return item;
  }));
}

// Says what is wrong with a node; nothing if it is well.
function troubles(node) {
  if (node.member.state === "DEAD") return "it stopped answering";
  if (node.member.state === "LEFT") return "it said good-bye";
  if (node.member.state === "DRAINING") return "it hands its pages over and is about to leave";
  if (node.member.state === "SUSPECT") return "it does not answer the node that serves this page";
  if (!node.counters) return "it did not tell its counters in time";
  const has = (name) => total(node.counters, name) > 0;
  const said = [];
  if (has("p2pkv_expelled")) said.push("another process has its node_id");
  if (has("p2pkv_alone")) said.push("it is alone, though join names others");
  if (has("p2pkv_disk_suspended")) said.push("its disk can't be used");
  if (has("p2pkv_fruitless_look_ups_total") && !total(node.counters, "p2pkv_found_pages_total") && !has("p2pkv_namespace_peers")) said.push("nothing it looks up is found with peers: see its namespace");
  return said.join("; ");
}

function room(node, used, capacity) {
  const cell = make("td");
  const all = total(node.counters, capacity);
  if (!all) { cell.textContent = "none"; return cell; }
  const meter = make("meter");
  meter.max = all; meter.value = total(node.counters, used);
  meter.title = `${bytes(meter.value)} of ${bytes(all)}`;
  cell.append(meter, ` ${bytes(all)}`);
  return cell;
}
function members(reading, before) {
  const heads = [["node"], ["state"], ["why", ""], ["pool"], ["disk"], ["pages", "n"], ["fetched pages", "n"], ["missed pages", "n"], ["published pages", "n"], ["evicted pages", "n"], ["fetched/s", "n"], ["fetch p99", "n"], ["ring", "n"], ["namespace"]];
  const rows = [...reading.nodes.values()].map((node) => {
    const row = make("tr");
    row.dataset.node = node.member.node_id;
    const state = node.member.state.toLowerCase();
    const why = troubles(node);
    row.append(make("td", node.member.node_id), make("td", state, state === "alive" ? (why ? "warn" : "good") : ["suspect", "draining"].includes(state) ? "warn" : "bad"), make("td", why, "why"));
    if (!node.counters) { const cell = make("td", "no numbers", "none"); cell.colSpan = heads.length - 3; row.append(cell); return row; }
    const grown = grownOf(reading, before, node.member.node_id);
    const took = before ? reading.at - before.at : 1;
    row.append(room(node, "p2pkv_pool_used_bytes", "p2pkv_pool_capacity_bytes"), room(node, "p2pkv_disk_used_bytes", "p2pkv_disk_capacity_bytes"));
    for (const metric of ["p2pkv_pool_pages", "p2pkv_fetched_pages_total", "p2pkv_missed_pages_total", "p2pkv_published_pages_total", "p2pkv_evicted_pages_total"]) row.append(number(total(node.counters, metric), metric));
    row.append(number(grown ? total(grown, "p2pkv_fetched_bytes_total") / took : null, "", bytes), number(grown ? quantile(grown, "p2pkv_fetch_seconds", 0.99) : null, "", seconds), number(total(node.counters, "p2pkv_ring_share_ratio"), "p2pkv_ring_share_ratio", percent));
    const info = Object.keys(node.counters).find((series) => series.startsWith("p2pkv_build_info{"));
    row.append(make("td", info ? labelsOf(info).namespace : ""));
    return row;
  });
  fillTable(byId("members"), heads, rows);
}

function reads(reading, before) {
  const rows = [];
  for (const node of reading.nodes.values()) {
    const grown = grownOf(reading, before, node.member.node_id);
    for (const [series, value] of Object.entries(node.counters || {})) {
      if (!series.startsWith("p2pkv_peer_read_bytes_total{")) continue;
      const { peer, transport } = labelsOf(series);
      const row = make("tr");
      row.append(make("td", node.member.node_id), make("td", peer), make("td", transport), number(value, series, bytes), number(grown ? grown[series] / (reading.at - before.at) : null, "", bytes));
      rows.push([value, row]);
    }
  }
  rows.sort((a, b) => b[0] - a[0]);
  fillTable(byId("reads"), [["reader"], ["owner"], ["transport"], ["bytes", "n"], ["bytes/s", "n"]], rows.slice(0, 200).map(([, row]) => row), "nobody has read from a node that is there now");
}

const REASONS = {
  not_found: "nobody was known to have it", rejected: "it was another page by the time it was read", peer_lost: "its owner was lost",
  timed_out: "it did not come in time", checksum: "its bytes were damaged", not_promoted: "its owner's disk did not bring it in time", device: "not copied to or from the device",
  no_room: "everything in the pool was held", no_directory: "no owner of its entry answered", epoch: "computed before a bump",
};
const REASONED = { p2pkv_missed_pages_total: "missed", p2pkv_unpublished_pages_total: "not published" };
function misses(reading) {
  const rows = [];
  for (const node of reading.nodes.values()) {
    for (const [metric, what] of Object.entries(REASONED)) {
      for (const [reason, value] of Object.entries(byLabel(node.counters || {}, metric, "reason"))) {
        if (!value) continue;
        const row = make("tr");
        row.append(make("td", node.member.node_id), make("td", what), make("td", `${reason}: ${REASONS[reason] || ""}`, "why"), number(value, `${metric}{reason="${reason}"}`));
        rows.push(row);
      }
    }
  }
  fillTable(byId("misses"), [["node"], ["pages"], ["reason"], ["pages", "n"]], rows);
}

// --- events: what differs from one reading to the next

const NOTABLE = {
  p2pkv_membership_suspicions_total: "suspected nodes", p2pkv_membership_deaths_total: "declared nodes dead", p2pkv_transport_fallbacks_total: "did not reach a peer over the preferred transport",
  p2pkv_refused_strangers_total: "refused connections with another secret", p2pkv_bumps_total: "heard of bumps of its namespace", p2pkv_disk_suspensions_total: "could not use its disk any more",
  p2pkv_rejected_reads_total: "read pages that were other pages by then", p2pkv_damaged_reads_total: "read damaged pages", p2pkv_engine_failures_total: "had calls of its engine fail: read its log",
};
function events(now, before) {
  if (!before) return;
  for (const [nodeId, node] of now.nodes) {
    const earlier = before.nodes.get(nodeId);
    const state = node.member.state;
    if (!earlier) tell(now.at, `${nodeId} has come`, "good");
    else if (earlier.member.boot_epoch !== node.member.boot_epoch) tell(now.at, `${nodeId} was restarted: what its pool had is gone`, "warn");
    else if (earlier.member.state !== state) tell(now.at, `${nodeId} is ${state.toLowerCase()}${troubles(node) ? `: ${troubles(node)}` : ""}`, state === "ALIVE" ? "good" : "bad");
    const grown = earlier && earlier.member.boot_epoch === node.member.boot_epoch ? grownOf(now, before, nodeId) : null;
    if (!grown) continue;
    for (const [metric, what] of Object.entries(REASONED)) {
      for (const [reason, value] of Object.entries(byLabel(grown, metric, "reason"))) if (value) tell(now.at, `${nodeId}: ${count(value)} pages ${what}, ${reason}: ${REASONS[reason] || ""}`, reason === "checksum" ? "bad" : "");
    }
    for (const [metric, what] of Object.entries(NOTABLE)) if (total(grown, metric)) tell(now.at, `${nodeId} ${what} (${count(total(grown, metric))})`, "warn");
  }
  for (const nodeId of before.nodes.keys()) if (!now.nodes.has(nodeId)) tell(now.at, `${nodeId} is forgotten: it was gone for a while`);
}

// --- asking

async function turn() {
  try {
    const told = await ask("cluster.json");
    const reading = { at: told.at, nodes: new Map(told.members.map((member) => [member.node_id, { member, counters: told.counters[member.node_id] || null }])) };
    const before = readings[readings.length - 1];
    if (!before || reading.at > before.at) {
      readings.push(reading);
      while (readings[0].at < reading.at - SECONDS) readings.shift();
      byId("cluster").textContent = `cluster ${told.cluster}, as node ${told.asked} sees it`;
      tiles(reading, graphs());
      members(reading, before);
      reads(reading, before);
      misses(reading);
      events(reading, before);
    }
    byId("state").textContent = `read at ${new Date(told.at * 1000).toLocaleTimeString()}`;
    byId("state").className = "";
  } catch (error) {
    byId("state").textContent = `the node does not answer: ${error.message}; asking again`;
    byId("state").className = "bad";
  }
  setTimeout(turn, EVERY_MS);
}

async function explain(key, namespace) {
  const shown = byId("explained");
  shown.hidden = false;
  shown.textContent = "asking all members";
  const query = new URLSearchParams(/^[0-9a-f]{32}$/i.test(key) ? { id: key } : { key });
  if (namespace) query.set("namespace", namespace);
  try {
    shown.textContent = (await ask(`explain.json?${query}`)).lines.join("\n");
  } catch (error) {
    shown.textContent = error.message;
  }
}
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  explain(byId("key").value, byId("namespace").value);
});

if (params.get("key")) {
  byId("key").value = params.get("key");
  explain(params.get("key"), params.get("namespace") || "");
}
turn();
